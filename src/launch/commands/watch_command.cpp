#include "launch/commands/watch_command.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <sstream>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "launch/commands/run_options.h"
#include "launch/display/lines.h"
#include "launch/watch/diagnosis.h"
#include "launch/watch/running_job.h"
#include "launch/watch/top_view.h"

namespace torchspan::launch {
namespace {

constexpr Duration kAnswerLimit = std::chrono::seconds(2);
constexpr Duration kLeastPause = std::chrono::milliseconds(100);

void describe_job(CLI::App& command, WatchOptions& options) {
  command.add_option("job", options.job,
                     "The job's folder or the end of its name; not needed if one job runs on this host");
}

}  // namespace

void describe_stacks_options(CLI::App& command, WatchOptions& options) { describe_job(command, options); }

void describe_top_options(CLI::App& command, WatchOptions& options) {
  describe_job(command, options);
  command.add_option("--every", options.every, "Time between two tables");
  command.add_option("--count", options.count, "End after this many tables; 0: when the job ends")
      ->check(CLI::Range(0, 1'000'000'000));
}

std::string show_stacks(Executor& executor, const WatchOptions& options,
                        const rendezvous::Environment& environment) {
  const std::string folder = find_job(options.job, environment);
  const JobState job = ask_job(executor, folder, kAnswerLimit);
  return fmt::format("job {}\n{}{}{}", folder, job.note, job.note.empty() ? "" : "\n",
                     format_diagnosis(job.workers));
}

void show_top(Executor& executor, const WatchOptions& options, const rendezvous::Environment& environment,
              Display& out, bool terminal) {
  const Duration every = parse_duration(options.every, "--every");
  if (every < kLeastPause) {
    throw_invalid("--every {}: expected 100ms or more, because each table asks all workers", options.every);
  }
  RunningJob running(executor, find_job(options.job, environment));
  TopView view;
  TimePoint asked = executor.now();
  for (int shown = 0; (options.count == 0 || shown < options.count) && !out.broken();) {
    if (shown > 0) executor.sleep(every);
    const TimePoint now = executor.now();
    JobState job;
    try {
      job = ask_job(executor, running.folder(), kAnswerLimit);
    } catch (const Error&) {
      if (shown == 0) throw;
      if (!running.follow()) return;  // the job has ended
      continue;                       // its workers start again
    }
    std::istringstream lines(view.show(job.workers, now - asked) + job.note);
    asked = now;
    std::string clear = terminal ? "\x1b[H\x1b[2J" : "";
    for (std::string line; std::getline(lines, line); clear.clear()) {
      out.print_output(clear, without_controls(line));
    }
    ++shown;
  }
}

}  // namespace torchspan::launch
