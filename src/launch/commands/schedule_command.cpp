#include "launch/commands/schedule_command.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "core/api/throw_invalid.h"
#include "launch/whole_file.h"

namespace torchspan::launch {
namespace {

using schedule::Costs;
using schedule::MemoryUnit;
using schedule::Shape;
using schedule::Table;

/// What a schedule is made from.
struct Request {
  Shape shape;
  std::vector<Costs> costs;  ///< by rank, or one for all
  double memory = 0;
};

struct NamedSchedule {
  const char* name;
  int chunks;  ///< by default
  bool takes_chunks;
  Table (*make)(const Request& request);
};

Table search(const Request& request, const schedule::Placement& placement) {
  return schedule::zero_bubble(placement, schedule::divide_costs(request.costs, placement.rank_of_stage),
                               request.memory);
}

constexpr std::array<NamedSchedule, 12> kSchedules = {{
    {"gpipe", 1, true, [](const Request& r) { return schedule::gpipe(schedule::looped(r.shape)); }},
    {"1f1b", 1, false, [](const Request& r) { return schedule::one_forward_one_backward(r.shape); }},
    {"interleaved", 1, true, [](const Request& r) { return schedule::interleaved(r.shape); }},
    {"bfs", 1, true, [](const Request& r) { return schedule::looped_breadth_first(r.shape); }},
    {"forward-only", 1, true,
     [](const Request& r) { return schedule::forward_only(schedule::looped(r.shape)); }},
    {"zb-h1", 1, false, [](const Request& r) { return schedule::zero_bubble_h1(r.shape); }},
    {"zb-h2", 1, false, [](const Request& r) { return schedule::zero_bubble_h2(r.shape); }},
    {"interleaved-zb", 2, true, [](const Request& r) { return schedule::interleaved_zero_bubble(r.shape); }},
    {"zbv", 2, true, [](const Request& r) { return schedule::zero_bubble_v(r.shape); }},
    {"dualpipev", 2, true, [](const Request& r) { return schedule::dual_pipe_v(r.shape); }},
    {"zero-bubble", 1, true, [](const Request& r) { return search(r, schedule::looped(r.shape)); }},
    {"zero-bubble-v", 2, true, [](const Request& r) { return search(r, schedule::v_shaped(r.shape)); }},
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
  for (const NamedSchedule& known : kSchedules) {
    if (options.name != known.name) continue;
    if (options.chunks > 1 && !known.takes_chunks) {
      throw_invalid("{} has one chunk per stage; the schedules for --chunks {} are: {}", known.name,
                    options.chunks, names(true));
    }
    return known;
  }
  throw_invalid("unknown schedule '{}'; the schedules are: {}", options.name, schedule_names());
}

void check_counts(const ScheduleOptions& options) {
  if (options.name.empty()) {
    throw_invalid("torchspan schedule NAME: the name is missing; the schedules are: " + schedule_names());
  }
  if (options.stages == 0) throw_invalid("--stages is required");
  if (options.micro_batches == 0) throw_invalid("--micro-batches is required");
}

CostsByRank checked_costs(const ScheduleOptions& options, int ranks) {
  CostsByRank all = costs_by_rank(options);
  if (all.costs.size() != 1 && all.costs.size() != static_cast<std::size_t>(ranks)) {
    throw_invalid("--costs-file has {} stages; expected {}, or one for all", all.costs.size(), ranks);
  }
  return all;
}

std::string in_milliseconds(Duration time) {
  const double milliseconds = std::chrono::duration<double, std::milli>(time).count();
  return fmt::format("{:g} ms", std::round(milliseconds * 1000) / 1000);
}

/// The lines below the grid: the length of a step, and each rank's idle time and memory.
std::string figures(const Table& table, const schedule::Timeline& timeline, MemoryUnit unit) {
  const auto& waiting = timeline.peak_weight_inputs;
  const bool is_split = std::any_of(waiting.begin(), waiting.end(), [](double peak) { return peak > 0; });
  std::string rows;
  for (std::size_t rank = 0; rank < timeline.idle.size(); ++rank) {
    rows += fmt::format("{:<6}{:<14}{}", rank, in_milliseconds(timeline.idle[rank]),
                        memory_text(timeline.peak_live[rank], unit));
    if (is_split) rows += fmt::format(" ({})", memory_text(waiting[rank], unit));
    rows += '\n';
  }
  std::string text = fmt::format(
      "\n{}: a step of {} micro-batches takes {}; the ranks are idle for {:.1f} % of it\n", timeline.name,
      table.micro_batches, in_milliseconds(timeline.makespan), 100 * schedule::idle_share(timeline));
  if (schedule::step_period(timeline) != timeline.makespan) {
    text +=
        fmt::format("repeated without a barrier: {} per step; the ranks are idle for {:.1f} % of it\n",
                    in_milliseconds(schedule::step_period(timeline)), 100 * schedule::bubble_share(timeline));
  }
  text += fmt::format("rank  idle          peak ({}",
                      unit == MemoryUnit::kBytes ? "bytes" : "activations of a micro-batch on a rank");
  return text + (is_split ? "; in brackets: kept for weight gradients)\n" : ")\n") + rows;
}

void write_file(const char* option, const std::string& file, const std::string& text) {
  const std::string problem = write_whole_file(file, text);
  if (!problem.empty()) throw_invalid("{} {}: {}", option, file, problem);
}

/// What show() needs besides the timeline.
struct Shown {
  schedule::Sheet sheet;
  MemoryUnit unit = MemoryUnit::kAny;
};

/// The grid and figures of a schedule; writes the files that the options ask for.
std::string show(const ScheduleOptions& options, const Table& table, const schedule::Timeline& timeline,
                 const Shown& shown) {
  std::string text = schedule::draw_text(timeline) + figures(table, timeline, shown.unit);
  if (!options.file.empty()) {
    write_file("--out", options.file, schedule::draw_svg({timeline}));
    text += "drawn in " + options.file + "\n";
  }
  if (!options.csv_out.empty()) {
    write_file("--csv-out", options.csv_out, schedule::to_csv(shown.sheet));
    text += "written to " + options.csv_out + "\n";
  }
  return text;
}

std::string show_csv(const ScheduleOptions& options) {
  if (!options.name.empty()) {
    throw_invalid("--csv {} reads a schedule; remove the name '{}', or use --csv-out to write",
                  options.csv_in, options.name);
  }
  const schedule::Sheet sheet = schedule::parse_csv(read_file("--csv", options.csv_in));
  const Table table = schedule::to_table(sheet, options.csv_in);
  const CostsByRank by_rank = checked_costs(options, table.ranks());
  const auto costs = schedule::divide_costs(by_rank.costs, table.rank_of_stage);
  return show(options, table, schedule::simulate(table, costs), {sheet, by_rank.unit});
}

/// Peaks by rank; their range if there are many.
std::string peaks(const std::vector<double>& peaks, MemoryUnit unit) {
  constexpr std::size_t kMost = 16;
  if (peaks.size() > kMost) {
    const auto [least, most] = std::minmax_element(peaks.begin(), peaks.end());
    return fmt::format("{} to {}", memory_text(*least, unit), memory_text(*most, unit));
  }
  std::string text;
  const char* const separator = unit == MemoryUnit::kBytes ? ", " : " ";
  for (const double peak : peaks) text += (text.empty() ? "" : separator) + memory_text(peak, unit);
  return text;
}

std::string ranking(const std::vector<schedule::Candidate>& candidates, MemoryUnit unit) {
  std::string text = fmt::format("{:<16}{:<8}{:<14}{:<9}{:<14}{:<9}{}\n", "schedule", "chunks", "step",
                                 "idle", "repeated", "idle", "peak by rank");
  for (const auto& candidate : candidates) {
    const schedule::Timeline& timeline = candidate.timeline;
    text += fmt::format("{:<16}{:<8}{:<14}{:<9}{:<14}{:<9}{}{}\n", timeline.name, candidate.stages_per_rank,
                        in_milliseconds(timeline.makespan),
                        fmt::format("{:.1f} %", 100 * schedule::idle_share(timeline)),
                        in_milliseconds(schedule::step_period(timeline)),
                        fmt::format("{:.1f} %", 100 * schedule::bubble_share(timeline)),
                        peaks(timeline.peak_live, unit), candidate.fits ? "" : "  more than --memory");
  }
  return text;
}

std::string show_best(const ScheduleOptions& options) {
  if (options.chunks != 0) throw_invalid("best compares one and two chunks per stage; remove --chunks");
  const CostsByRank by_rank = checked_costs(options, options.stages);
  const schedule::Comparison comparison =
      schedule::compare({.ranks = options.stages,
                         .micro_batches = options.micro_batches,
                         .costs = by_rank.costs,
                         .memory_limit = memory_limit(options, by_rank.unit)});
  std::string text = ranking(comparison.candidates, by_rank.unit);
  for (const std::string& why : comparison.undefined) text += "left out: " + why + "\n";
  const auto& best = comparison.candidates.front();
  return text + "\n" +
         show(options, best.table, best.timeline, {schedule::to_sheet(best.table), by_rank.unit});
}

}  // namespace

std::string schedule_names() { return names(false) + ", best"; }

std::string show_schedule(const ScheduleOptions& options) {
  if (!options.csv_in.empty()) return show_csv(options);
  check_counts(options);
  if (options.name == "best") return show_best(options);
  const NamedSchedule& known = find_schedule(options);
  const CostsByRank by_rank = checked_costs(options, options.stages);
  const Request request{{.ranks = options.stages,
                         .micro_batches = options.micro_batches,
                         .stages_per_rank = options.chunks == 0 ? known.chunks : options.chunks},
                        by_rank.costs,
                        memory_limit(options, by_rank.unit)};
  const Table table = known.make(request);
  const auto costs = schedule::divide_costs(request.costs, table.rank_of_stage);
  return show(options, table, schedule::simulate(table, costs), {schedule::to_sheet(table), by_rank.unit});
}

namespace {

using schedule::Costs;
using schedule::MemoryUnit;

/// Suffixes of amounts of memory, the largest first.
struct ByteUnit {
  const char* name;
  double bytes;
  bool binary;  ///< used in output
};
constexpr std::array<ByteUnit, 9> kByteUnits = {{{"TiB", 1024.0 * 1024 * 1024 * 1024, true},
                                                 {"TB", 1e12, false},
                                                 {"GiB", 1024.0 * 1024 * 1024, true},
                                                 {"GB", 1e9, false},
                                                 {"MiB", 1024.0 * 1024, true},
                                                 {"MB", 1e6, false},
                                                 {"KiB", 1024, true},
                                                 {"kB", 1e3, false},
                                                 {"B", 1, false}}};

constexpr double kMostMilliseconds = 1e6;
constexpr double kMostMemory = 1e12;

Duration from_milliseconds(const std::string& what, double milliseconds) {
  if (!(milliseconds >= 0 && milliseconds <= kMostMilliseconds)) {
    throw_invalid("{} {}: from 0 to {} milliseconds are possible", what, milliseconds, kMostMilliseconds);
  }
  return Duration(std::llround(milliseconds * 1e6));
}

/// One stage's entry of a costs file.
class Entry {
 public:
  Entry(const nlohmann::json& json, std::size_t number) : json_(json), number_(number) {
    if (!json.is_object()) throw_invalid("--costs-file: stages[{}] is not an object", number);
    for (const auto& [key, value] : json.items()) check_key(key);
  }

  Costs read() const {
    Costs costs;
    costs.forward = time("forward");
    if (json_.contains("backward")) {
      for (const char* half : {"input_gradient", "weight_gradient"}) {
        if (json_.contains(half)) {
          throw_invalid("--costs-file: stages[{}] has backward and {}; remove one", number_, half);
        }
      }
      const Duration backward = time("backward");
      costs.input_gradient = backward / 2;
      costs.weight_gradient = backward - backward / 2;
    } else {
      costs.input_gradient = time("input_gradient");
      costs.weight_gradient = time("weight_gradient");
    }
    if (json_.contains("transfer")) costs.transfer = time("transfer");
    if (json_.contains("activation")) costs.activation = memory("activation");
    if (json_.contains("weight_input")) costs.weight_input = memory("weight_input");
    if (json_.contains("recomputation")) costs.recomputation = memory("recomputation");
    return costs;
  }

 private:
  void check_key(const std::string& key) const {
    constexpr std::array<const char*, 8> kKeys = {"forward",         "backward",     "input_gradient",
                                                  "weight_gradient", "transfer",     "activation",
                                                  "weight_input",    "recomputation"};
    for (const char* known : kKeys) {
      if (key == known) return;
    }
    throw_invalid(
        "--costs-file: stages[{}] has an unknown key '{}'; expected forward, backward (or input_gradient and "
        "weight_gradient), transfer, activation, weight_input, recomputation",
        number_, key);
  }

  double number(const char* key) const {
    const auto value = json_.find(key);
    if (value == json_.end()) throw_invalid("--costs-file: stages[{}] has no {}", number_, key);
    if (!value->is_number()) {
      throw_invalid("--costs-file: {} of stages[{}] is not a number", key, number_);
    }
    return value->get<double>();
  }

  Duration time(const char* key) const {
    return from_milliseconds(fmt::format("--costs-file: {} of stages[{}] is", key, number_), number(key));
  }

  double memory(const char* key) const {
    const double value = number(key);
    if (value >= 0 && value <= kMostMemory) return value;
    throw_invalid("--costs-file: {} of stages[{}] is {}; expected from 0 to {}", key, number_, value,
                  kMostMemory);
  }

  const nlohmann::json& json_;
  const std::size_t number_;
};

}  // namespace

CostsByRank parse_costs(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) throw_invalid("--costs-file: the file is not JSON");
  if (!json.is_object() || !json.contains("stages") || !json["stages"].is_array() || json["stages"].empty()) {
    throw_invalid("--costs-file: expected {\"stages\": [{\"forward\": 1, \"backward\": 2}, ...]}");
  }
  CostsByRank all;
  if (json.contains("memory")) {
    if (json["memory"] != "bytes") {
      throw_invalid("--costs-file: memory is {}; the only unit is \"bytes\", or remove the key",
                    json["memory"].dump());
    }
    all.unit = MemoryUnit::kBytes;
  }
  for (const auto& stage : json["stages"]) all.costs.push_back(Entry(stage, all.costs.size()).read());
  return all;
}

double memory_limit(const ScheduleOptions& options, MemoryUnit unit) {
  const std::string& text = options.memory;
  if (text.empty()) return std::numeric_limits<double>::infinity();
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string suffix = end;
  const auto found = std::find_if(kByteUnits.begin(), kByteUnits.end(),
                                  [&](const ByteUnit& each) { return suffix == each.name; });
  const bool known = end != text.c_str() && (suffix.empty() || found != kByteUnits.end());
  if (!known || !(number >= 0)) {
    throw_invalid(
        "--memory {}: expected activations of a micro-batch, bytes (4GiB, 512MiB, 100B), or 0 for no limit",
        text);
  }
  if (!suffix.empty() && unit != MemoryUnit::kBytes) {
    throw_invalid(
        "--memory {}: the costs do not say how many bytes an activation has; give a --costs-file with "
        "\"memory\": \"bytes\", which costs_json(pipeline::measure_costs(...), MemoryUnit::kBytes) writes",
        text);
  }
  if (number == 0) return std::numeric_limits<double>::infinity();
  return suffix.empty() ? number : number * found->bytes;
}

std::string memory_text(double amount, MemoryUnit unit) {
  if (unit != MemoryUnit::kBytes) return fmt::format("{:.4g}", amount);
  for (const ByteUnit& each : kByteUnits) {
    if (each.binary && amount >= each.bytes) return fmt::format("{:.4g} {}", amount / each.bytes, each.name);
  }
  return fmt::format("{:.4g} B", amount);
}

std::string read_file(const char* option, const std::string& file) {
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in.is_open() || in.bad()) throw_invalid("{} {}: {}", option, file, std::strerror(errno));
  return text;
}

CostsByRank costs_by_rank(const ScheduleOptions& options) {
  if (!options.costs_file.empty()) return parse_costs(read_file("--costs-file", options.costs_file));
  Costs costs;
  costs.transfer = from_milliseconds("--transfer", options.transfer);
  if (options.costs.empty()) {
    const Duration backward = from_milliseconds("--backward", options.backward);
    costs.forward = from_milliseconds("--forward", options.forward);
    costs.input_gradient = backward / 2;
    costs.weight_gradient = backward - backward / 2;
  } else {
    if (options.costs.size() != 3) {
      throw_invalid("--costs has {} numbers; expected FORWARD,INPUT_GRADIENT,WEIGHT_GRADIENT",
                    options.costs.size());
    }
    costs.forward = from_milliseconds("--costs", options.costs[0]);
    costs.input_gradient = from_milliseconds("--costs", options.costs[1]);
    costs.weight_gradient = from_milliseconds("--costs", options.costs[2]);
  }
  if (!(options.weight_input >= 0 && options.weight_input <= 1)) {
    throw_invalid("--weight-input {}: expected from 0 to 1 activations", options.weight_input);
  }
  costs.weight_input = options.weight_input;
  return {{costs}};
}

}  // namespace torchspan::launch
