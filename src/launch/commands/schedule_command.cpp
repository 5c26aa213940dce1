#include "launch/commands/schedule_command.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <fstream>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

namespace torchspan::launch {
namespace {

using schedule::Shape;
using schedule::Table;

struct NamedSchedule {
  const char* name;
  bool takes_chunks;
  Table (*make)(Shape shape);
};

constexpr std::array<NamedSchedule, 5> kSchedules = {{
    {"gpipe", true, [](Shape shape) { return schedule::gpipe(schedule::looped(shape)); }},
    {"1f1b", false, [](Shape shape) { return schedule::one_forward_one_backward(shape); }},
    {"interleaved", true, [](Shape shape) { return schedule::interleaved(shape); }},
    {"bfs", true, [](Shape shape) { return schedule::looped_breadth_first(shape); }},
    {"forward-only", true, [](Shape shape) { return schedule::forward_only(schedule::looped(shape)); }},
}};

std::string names(bool with_chunks_only) {
  std::string names;
  for (const NamedSchedule& known : kSchedules) {
    if (with_chunks_only && !known.takes_chunks) continue;
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return names;
}

const NamedSchedule& find_schedule(const ScheduleOptions& options) {
  if (options.name.empty())
    throw_invalid("torchspan schedule NAME: the name is missing; the schedules are: " + names(false));
  for (const NamedSchedule& known : kSchedules) {
    if (options.name != known.name) continue;
    if (options.chunks > 1 && !known.takes_chunks) {
      throw_invalid(fmt::format("{} has one chunk per stage; the schedules for --chunks {} are: {}",
                                known.name, options.chunks, names(true)));
    }
    return known;
  }
  throw_invalid(fmt::format("unknown schedule '{}'; the schedules are: {}", options.name, names(false)));
}

Duration from_milliseconds(const char* option, double milliseconds, int parts) {
  constexpr double kMost = 1e6;
  if (!(milliseconds >= 0 && milliseconds <= kMost)) {
    throw_invalid(fmt::format("{} {}: from 0 to {} milliseconds are possible", option, milliseconds, kMost));
  }
  return Duration(std::llround(milliseconds * 1e6 / parts));
}

schedule::Costs costs_of(const ScheduleOptions& options) {
  const Duration backward = from_milliseconds("--backward", options.backward, options.chunks);
  return {.forward = from_milliseconds("--forward", options.forward, options.chunks),
          .input_gradient = backward / 2,
          .weight_gradient = backward - backward / 2,
          .transfer = from_milliseconds("--transfer", options.transfer, 1),
          .activation = 1.0 / options.chunks};
}

std::string in_milliseconds(Duration time) {
  const double milliseconds = std::chrono::duration<double, std::milli>(time).count();
  return fmt::format("{:g} ms", std::round(milliseconds * 1000) / 1000);
}

/// The lines below the grid: the length of a step, and each rank's idle time and memory.
std::string figures(const ScheduleOptions& options, const schedule::Timeline& timeline) {
  Duration idle{0};
  std::string rows;
  for (std::size_t rank = 0; rank < timeline.idle.size(); ++rank) {
    idle += timeline.idle[rank];
    rows += fmt::format("{:<6}{:<14}{:.4g}\n", rank, in_milliseconds(timeline.idle[rank]),
                        timeline.peak_live[rank]);
  }
  const auto all = static_cast<double>(timeline.makespan.count()) * options.stages;
  const double share = all > 0 ? static_cast<double>(idle.count()) / all : 0;
  return fmt::format("\n{}: a step of {} micro-batches takes {}; the ranks are idle for {:.1f} % of it\n",
                     timeline.name, options.micro_batches, in_milliseconds(timeline.makespan), 100 * share) +
         "rank  idle          peak (activations of a micro-batch on a rank)\n" + rows;
}

void write_file(const std::string& file, const std::string& text) {
  std::ofstream out(file, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw_invalid(fmt::format("--out {}: {}", file, std::strerror(errno)));
}

}  // namespace

std::string schedule_names() { return names(false); }

std::string show_schedule(const ScheduleOptions& options) {
  const NamedSchedule& known = find_schedule(options);
  const Table table = known.make(
      {.ranks = options.stages, .micro_batches = options.micro_batches, .stages_per_rank = options.chunks});
  const schedule::Timeline timeline = schedule::simulate(table, {costs_of(options)});
  std::string text = schedule::draw_text(timeline) + figures(options, timeline);
  if (!options.file.empty()) {
    write_file(options.file, schedule::draw_svg({timeline}));
    text += "drawn in " + options.file + "\n";
  }
  return text;
}

}  // namespace torchspan::launch
