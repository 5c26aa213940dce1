#include "launch/supervisor/job.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <fmt/format.h>
#include <memory>
#include <optional>
#include <random>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "launch/supervisor/attempt.h"
#include "launch/supervisor/job_nodes.h"
#include "launch/supervisor/limits.h"
#include "launch/supervisor/processes.h"
#include "launch/supervisor/signals.h"
#include "launch/supervisor/worker_error.h"
#include "launch/whole_file.h"

namespace torchspan::launch {
namespace {

/// How an attempt ended.
struct AttemptReport {
  int workers = 0;
  int started = 0;
  std::vector<Ending> endings = {};
  FailureDetails details = {};
  std::optional<WorkerError> error = {};    ///< of the first failure, complete
  std::optional<Error> start_failure = {};  ///< it could not be started
  std::vector<Incident> incidents = {};     ///< operations that timed out
  /// The failure that ended the attempt on all hosts of a job on several; here or on another one.
  std::optional<JobNodes::Failure> on_nodes = {};
  bool met = true;  ///< false: this launcher gave up before those of the other hosts could begin

  bool failed() const { return start_failure || on_nodes || failure_code(endings) != 0; }
  /// Whether a signal ended the job before workers were started.
  bool never_begun() const { return started == 0 && !failed(); }
};

std::string random_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

/// "worker1 (rank 1, pid 17) exited with code 3"; empty if no worker has failed.
std::string brief(const std::vector<Ending>& endings) {
  const auto first = first_failure(endings);
  if (!first) return "";
  const Ending& ending = endings[*first];
  return fmt::format("{} (rank {}, pid {}) {}", ending.name, ending.rank, ending.pid,
                     describe_failure(ending));
}

std::string brief(const AttemptReport& report) {
  if (report.on_nodes) return report.on_nodes->text;
  return report.start_failure ? report.start_failure->message() : brief(report.endings);
}

std::string count_of(int workers) { return fmt::format("{} worker{}", workers, workers == 1 ? "" : "s"); }

/// Returns what the restart policy needs to know of a failed attempt.
AttemptResult result_of(const AttemptReport& report) {
  if (report.on_nodes) return report.on_nodes->result;
  AttemptResult result{.workers = report.workers, .started = report.started};
  if (report.start_failure) {
    result.code = 1;
    return result;
  }
  const auto first = first_failure(report.endings);
  if (!first) return result;
  const Ending& ending = report.endings[*first];
  result.ran = ending.after;
  result.code = ending.code;
  result.signal = ending.signal;
  return result;
}

/// Returns the timeouts with their first suspects; empty if there was none.
std::string describe_incidents(const std::vector<Incident>& incidents) {
  std::string text;
  for (const Incident& incident : incidents) {
    text += fmt::format("  {}\n", incident.headline());
    if (!incident.suspect.empty()) text += fmt::format("    first suspect: {}\n", incident.suspect);
    if (!incident.page.empty()) text += fmt::format("    all workers: {}\n", incident.place());
  }
  return text.empty() ? "" : "torchspan: operations that timed out\n" + text;
}

/// Returns the paragraphs of the earlier attempts; of many, the first and the last ones.
std::string describe_history(const std::vector<std::string>& history) {
  constexpr std::size_t kMost = 10;
  std::string text;
  for (std::size_t i = 0; i < history.size(); ++i) {
    const bool shown = i == 0 || i + kMost > history.size();
    if (shown) text += history[i];
    if (i == 1 && !shown) text += fmt::format(" … {} attempts are left out\n", history.size() - kMost);
  }
  return text.empty() ? "" : "torchspan: earlier attempts\n" + text;
}

/// Prints what ended the job on all hosts. Returns the exit code: `own`, or that of the other host's failure.
int say_failure_on_nodes(Display& display, const JobNodes::Failure& failure, int own) {
  display.say(fmt::format("{}  first failure on all hosts: {}\n",
                          own == 0 ? "torchspan: the job failed\n" : "", failure.text));
  if (own != 0) return own;
  const AttemptResult& result = failure.result;
  const int code = result.signal != 0 ? 128 + result.signal : std::max(result.code, 1);
  display.say(fmt::format("  exit code: {}\n", code));
  return code;
}

/// Writes the job's error file, if a worker of this host has failed.
void write_error_file(const std::string& path, const AttemptReport& report, Display& display) {
  const auto first = first_failure(report.endings);
  if (path.empty() || !first) return;
  const std::string problem =
      write_whole_file(path, encode_job_error(report.error, report.endings[*first], report.details));
  if (problem.empty()) return;
  display.say(fmt::format("torchspan: the error file '{}' cannot be written: {}\n", path, problem));
}

class Job {
 public:
  Job(Executor& executor, JobOptions options)
      : executor_(executor),
        options_(std::move(options)),
        run_id_(random_id()),
        display_(executor, options_.display),
        signals_(options_.preemption.signal),
        guard_(run_id_),
        poller_(executor.make_poller()) {
    interruption_.clean_code = options_.preemption.clean_code;
  }

  int run();

 private:
  JobSetting make_setting(const JobFolder& folder, int workers, std::uint16_t port) const;
  void prepare_logs() const;
  void say_threads(const JobSetting& setting);
  AttemptReport try_attempt(int workers);
  AttemptReport run_attempt(int workers);
  AttemptReport run_workers(const JobSetting& setting);
  void watch(Attempt& attempt);
  Reaction on_signal(int signal, Attempt* attempt, bool reported = false);
  bool meet_nodes(JobSetting& setting);
  void follow_nodes(Attempt& attempt);
  void end_on_nodes(AttemptReport& report);
  Reaction wait_for_nodes();
  void wait_before_restart(Duration delay);
  std::optional<NextAttempt> plan_next(const AttemptReport& report);
  std::string describe_attempt(const AttemptReport& report) const;
  int finish(const AttemptReport& last);
  int finish_between();

  Executor& executor_;
  const JobOptions options_;
  const std::string run_id_;
  Display display_;
  SignalDescriptor signals_;  // taken over before anything that must be undone
  Guard guard_;
  std::unique_ptr<Poller> poller_;
  std::string program_;
  Interruption interruption_;
  int replacements_used_ = 0;
  std::vector<AttemptResult> failed_attempts_;
  std::vector<std::string> history_;        ///< a paragraph for each attempt that was followed by another
  std::string reason_;                      ///< why the last one was not
  std::unique_ptr<JobNodes> nodes_;         ///< null: the job runs on this host
  std::optional<ReservedPort> store_port_;  ///< of an attempt on several hosts
};

JobSetting Job::make_setting(const JobFolder& folder, int workers, std::uint16_t port) const {
  JobSetting setting;
  setting.workers = workers;
  setting.restart_count = static_cast<int>(failed_attempts_.size());
  setting.max_restarts = options_.restarts.most;
  setting.preempt_signal = options_.preemption.signal;
  setting.name_prefix = options_.name_prefix;
  setting.run_id = run_id_;
  setting.master_port = port;
  setting.secret_file = folder.secret_file();
  setting.runtime_folder = folder.runtime_folder();
  setting.error_folder = folder.error_folder();
  setting.cores = usable_cores();
  setting.nodes = options_.nodes;
  setting.extra = options_.extra;
  return setting;
}

void Job::prepare_logs() const {
  if (options_.log_folder.empty()) return;
  std::error_code failure;
  std::filesystem::create_directories(options_.log_folder, failure);
  if (!failure) return;
  throw_invalid("the folder for logs '{}' cannot be created: {}", options_.log_folder, failure.message());
}

void Job::say_threads(const JobSetting& setting) {
  const int threads = chosen_threads(options_.environment, setting);
  if (threads == 0) return;
  display_.say(fmt::format(
      "torchspan: OMP_NUM_THREADS={} for each of {} workers on {} cores; set it to choose otherwise\n",
      threads, setting.workers, setting.cores));
}

int Job::run() {
  program_ = find_program(options_.command.at(0), options_.environment);
  prepare_logs();
  poller_->add(signals_.get(), token_of(Source::kSignal, 0), false);
  if (options_.nodes.several()) {
    nodes_ = std::make_unique<JobNodes>(executor_, options_, *poller_);
  }
  for (int workers = options_.workers;;) {
    const AttemptReport report = try_attempt(workers);
    const auto next = plan_next(report);
    if (!next) return report.never_begun() ? finish_between() : finish(report);
    workers = next->workers;
    wait_before_restart(next->delay);
    if (interruption_.signal != 0) return finish_between();
  }
}

/// Runs an attempt; what prevents a later one from starting is its failure.
AttemptReport Job::try_attempt(int workers) {
  try {
    return run_attempt(workers);
  } catch (const Error& error) {
    if (failed_attempts_.empty()) throw;
    return {.workers = workers, .started = workers, .start_failure = error, .met = false};
  }
}

AttemptReport Job::run_attempt(int workers) {
  const JobFolder folder(options_.environment);
  std::optional<ReservedPort> chosen;
  if (options_.master_port == 0) {
    chosen.emplace(choose_port());
  } else {
    check_port(options_.master_port);
    chosen = ReservedPort::take(options_.master_port);  // so that launchers which draw theirs avoid it
  }
  JobSetting setting =
      make_setting(folder, workers, options_.master_port != 0 ? options_.master_port : chosen->number());
  if (nodes_ && !meet_nodes(setting)) return {.workers = workers};
  AttemptReport report = run_workers(setting);
  if (nodes_) end_on_nodes(report);
  return report;
}

/// Starts the workers and waits for their ends. No process of the job is left when it returns or throws, also none that
/// left its worker's group.
AttemptReport Job::run_workers(const JobSetting& setting) {
  const ProcessCleanup cleanup(executor_, run_id_);
  AttemptReport report{.workers = setting.workers};
  if (failed_attempts_.empty()) say_threads(setting);
  const AttemptContext context{executor_,          options_,
                               display_,           *poller_,
                               program_,           guard_.registrations(),
                               replacements_used_, nodes_ ? &nodes_->link() : nullptr};
  Attempt attempt(context, setting);
  try {
    attempt.start();
    watch(attempt);
  } catch (const Error& error) {
    report.start_failure = error;
  }
  report.started = attempt.started();
  replacements_used_ = attempt.replacements_used();
  report.incidents = attempt.finish();
  report.endings = attempt.endings();
  if (const auto index = first_failure(report.endings)) {
    const Ending& first = report.endings[*index];
    report.details.last_lines = attempt.workers().find(first.pid)->last_lines();
    report.error =
        read_worker_error(error_file_of(setting, setting.local_rank_of(first.rank), first.incarnation));
    if (report.error) report.details.error = shorten_message(report.error->message);
  }
  return report;
}

/// Waits until the launchers of all hosts are ready for the attempt, and sets the port of its store. Returns false if a
/// signal ends the job first.
bool Job::meet_nodes(JobSetting& setting) {
  const Environment worker = worker_environment(options_.environment, setting, 0);
  const auto range = worker.find("TORCHSPAN_PORT_RANGE");
  const bool serves = options_.nodes.node_rank == 0;
  store_port_.reset();
  if (serves) store_port_.emplace(choose_store_port(range == worker.end() ? "" : range->second));
  nodes_->ready(setting.restart_count, store_port_ ? store_port_->number() : std::uint16_t{0});
  while (interruption_.signal == 0 && !nodes_->may_start()) wait_for_nodes();
  if (interruption_.signal != 0) return false;
  if (nodes_->store_port() != 0) setting.nodes.rdzv_port = nodes_->store_port();
  nodes_->running();
  return true;
}

/// Waits for news of the other hosts or a signal, while no worker runs. Returns what the signal to this launcher asks for.
Reaction Job::wait_for_nodes() {
  std::array<Poller::Event, 4> events;
  const int signal = poller_->wait(events, Deadline::never()) > 0 ? signals_.take() : 0;
  const Reaction reaction = on_signal(signal, nullptr);
  on_signal(nodes_->take_signal(), nullptr, true);
  return reaction;
}

/// Does what the launchers of the other hosts announce, and announces a failure of this host.
void Job::follow_nodes(Attempt& attempt) {
  on_signal(nodes_->take_signal(), &attempt, true);
  const auto first = first_failure(attempt.endings());
  if (first && attempt.stopping()) {
    nodes_->fail(
        result_of({.workers = options_.workers, .started = attempt.started(), .endings = attempt.endings()}),
        brief(attempt.endings()));
  }
  const std::string failure = nodes_->take_failure();
  if (failure.empty() || attempt.stopping()) return;
  display_.say(fmt::format("torchspan: {}; stopping the workers of this host\n", failure));
  attempt.stop(SIGTERM);
}

/// Waits until no worker of the attempt is left on any host, or a launcher is gone, or for a second signal.
void Job::end_on_nodes(AttemptReport& report) {
  if (report.failed()) nodes_->fail(result_of(report), brief(report));
  nodes_->end();
  while (!nodes_->all_ended()) {
    const bool interrupted = interruption_.signal != 0;
    if (wait_for_nodes() != Reaction::kNone && interrupted) break;
  }
  on_signal(nodes_->take_signal(), nullptr, true);
  report.on_nodes = nodes_->failure();
}

/// Runs the attempt until it is over.
void Job::watch(Attempt& attempt) {
  std::array<Poller::Event, 64> events;
  while (!attempt.over()) {
    const std::size_t count = poller_->wait(events, attempt.next_deadline());
    for (std::size_t i = 0; i < count; ++i) {
      if (static_cast<Source>(events[i].token >> 32) == Source::kSignal) {
        on_signal(signals_.take(), &attempt);
      } else {
        attempt.handle(events[i]);
      }
    }
    if (const int reported = attempt.take_reported_signal(); reported != 0) {
      on_signal(reported == SIGTERM ? SIGTERM : options_.preemption.signal, &attempt, true);
    }
    if (nodes_) follow_nodes(attempt);
    attempt.advance(executor_.now());
    if (display_.broken() && interruption_.signal == 0) {
      interruption_.signal = SIGPIPE;
      if (nodes_) nodes_->announce_signal(SIGTERM);
      attempt.stop(SIGTERM);
    }
  }
}

Reaction Job::on_signal(int signal, Attempt* attempt, bool reported) {
  if (signal == 0) return Reaction::kNone;
  if (nodes_) nodes_->announce_signal(signal);
  const Reaction reaction = react(interruption_, signal, options_.preemption.signal, reported);
  if (attempt == nullptr || reaction == Reaction::kNone) return reaction;
  if (reaction == Reaction::kKill) {
    attempt->kill_workers();
  } else if (reaction == Reaction::kPreempt) {
    display_.say(fmt::format("torchspan: {}; the workers have {:.0f} s to write a checkpoint and end\n",
                             signal_name(signal), to_seconds(options_.preemption.grace)));
    attempt->preempt(signal);
  } else {
    display_.say(fmt::format("torchspan: {}; stopping the workers (repeat to kill them at once)\n",
                             signal_name(signal)));
    attempt->stop(signal == SIGINT ? SIGINT : SIGTERM);
  }
  return reaction;
}

void Job::wait_before_restart(Duration delay) {
  const Deadline end = executor_.deadline_in(delay);
  std::array<Poller::Event, 4> events;
  while (interruption_.signal == 0 && !end.passed(executor_.now())) {
    if (poller_->wait(events, end) > 0) on_signal(signals_.take(), nullptr);
    if (nodes_) on_signal(nodes_->take_signal(), nullptr, true);
  }
}

/// Decides whether the job starts again, and announces it.
std::optional<NextAttempt> Job::plan_next(const AttemptReport& report) {
  if (interruption_.signal != 0 || !report.failed()) return std::nullopt;
  const bool first = failed_attempts_.empty();
  failed_attempts_.push_back(result_of(report));
  if (nodes_ && (nodes_->lost() || !report.met)) {  // without this launcher, the others end
    if (first && report.start_failure) throw *report.start_failure;
    if (options_.restarts.most > 0) reason_ = "the launchers of all hosts must run for another attempt";
    return std::nullopt;
  }
  const int least = options_.least_workers > 0 ? options_.least_workers : options_.workers;
  const NextAttempt next = next_attempt(options_.restarts, {least, options_.workers}, failed_attempts_);
  const bool unusable = report.start_failure && report.start_failure->kind() == ErrorKind::kInvalid;
  if (first && report.start_failure && (unusable || next.workers == 0)) throw *report.start_failure;
  if (next.workers == 0) {
    reason_ = next.reason;
    return std::nullopt;
  }
  history_.push_back(describe_attempt(report));
  display_.say(fmt::format("torchspan: attempt {} failed: {}\n", failed_attempts_.size(), brief(report)));
  display_.say(fmt::format("torchspan: {}attempt {} with {} starts in {:.1f} s\n",
                           next.reason.empty() ? "" : next.reason + "; ", failed_attempts_.size() + 1,
                           count_of(next.workers), to_seconds(next.delay)));
  return next;
}

std::string Job::describe_attempt(const AttemptReport& report) const {
  const auto head = fmt::format(" attempt {}, {}\n", failed_attempts_.size(), count_of(report.workers));
  if (report.start_failure) return fmt::format("{}  {}\n", head, report.start_failure->message());
  const std::string on_all =
      report.on_nodes ? fmt::format("  first failure on all hosts: {}\n", report.on_nodes->text) : "";
  return head + on_all + describe_first_failure(report.endings, report.details) +
         describe_replacements(report.endings);
}

/// Prints the summary and returns the exit code.
int Job::finish(const AttemptReport& last) {
  int code = exit_code(last.endings, interruption_);
  display_.say(describe_history(history_));
  if (const std::string replaced = describe_replacements(last.endings); !replaced.empty()) {
    display_.say("torchspan: workers that were started again\n" + replaced);
  }
  if (!history_.empty() && code == 0 && !last.failed()) {
    display_.say(fmt::format("torchspan: attempt {} succeeded\n", failed_attempts_.size() + 1));
  }
  if (last.start_failure) {
    code = 1;
    display_.say(
        fmt::format("torchspan: the job failed\n  {}\n  exit code: 1\n", last.start_failure->message()));
  } else {
    display_.say(summarize(last.endings, last.details, interruption_));
    if (last.on_nodes && interruption_.signal == 0)
      code = say_failure_on_nodes(display_, *last.on_nodes, code);
  }
  if (code != 0) display_.say(describe_incidents(last.incidents));
  if (!reason_.empty()) display_.say(fmt::format("torchspan: not started again: {}\n", reason_));
  if (last.failed() && interruption_.signal == 0) write_error_file(options_.error_file, last, display_);
  const std::string lost = display_.losses();
  if (lost.empty()) return code;
  display_.say("torchspan: " + lost + "\n");
  return code == 0 ? kLostOutput : code;
}

/// Prints the summary of a job that a signal ended between two attempts, and returns the exit code.
int Job::finish_between() {
  const int code = interruption_.preemption && interruption_.clean_code != 0 ? interruption_.clean_code
                                                                             : 128 + interruption_.signal;
  display_.say(describe_history(history_));
  display_.say(fmt::format("torchspan: the job was {} by {} before attempt {}\n  exit code: {}\n",
                           interruption_.preemption ? "preempted" : "interrupted",
                           signal_name(interruption_.signal), failed_attempts_.size() + 1, code));
  return code;
}

}  // namespace

int run_job(Executor& executor, JobOptions options) {
  if (options.workers < 1) {
    throw_invalid("the number of workers is {}; expected 1 or more", options.workers);
  }
  if (options.least_workers > options.workers) {
    throw_invalid("the minimum number of workers is {}; expected at most {}, the number of workers",
                  options.least_workers, options.workers);
  }
  if (options.command.empty()) throw_invalid("there is no program to run");
  const RaisedOpenFiles raised;
  if (options.open_files == 0) options.open_files = raised.before();
  return Job(executor, std::move(options)).run();
}

}  // namespace torchspan::launch
