#include "launch/supervisor/attempt.h"

#include <algorithm>
#include <csignal>
#include <fmt/format.h>

#include <torchspan/core/preemption.h>

#include "launch/supervisor/processes.h"

namespace torchspan::launch {
namespace {

/// How long the launcher waits for output of processes that outlive their worker.
constexpr Duration kDrainTime = std::chrono::seconds(1);

/// Returns the worker whose end another one reports and whose process still runs: it is exiting, and its exit
/// code will follow.
const Worker* find_leaving(const std::vector<Ending>& endings,
                           const std::vector<std::unique_ptr<Worker>>& workers) {
  for (const Ending& ending : endings) {
    for (const auto& worker : workers) {
      if (!worker->ended() && worker->child().pid() == ending.blames) return worker.get();
    }
  }
  return nullptr;
}

}  // namespace

Attempt::Attempt(const AttemptContext& context, JobSetting setting)
    : context_(context),
      setting_(std::move(setting)),
      began_(context.executor.now()),
      view_(context.display, setting_.workers, began_),
      reporters_(static_cast<std::size_t>(setting_.workers), false) {}

void Attempt::start() {
  for (int rank = 0; rank < setting_.workers; ++rank) start_worker(rank);
}

void Attempt::start_worker(int rank) {
  const JobOptions& options = context_.options;
  const std::string name = options.name_prefix + std::to_string(rank);
  const WorkerNames names{.rank = rank,
                          .name = name,
                          .prefix = prefix_of(name, rank, options.display.colours),
                          .log_folder = options.log_folder,
                          .append = setting_.restart_count > 0};
  Child child(context_.program, options.command, worker_environment(options.environment, setting_, rank),
              context_.guard);
  workers_.push_back(std::make_unique<Worker>(names, std::move(child), context_.display, context_.poller));
}

bool Attempt::over() const {
  return all_ended() &&
         std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->silent(); });
}

void Attempt::handle(const Poller::Event& event) {
  const auto source = static_cast<Source>(event.token >> 32);
  Worker& worker = *workers_.at(static_cast<std::uint32_t>(event.token));
  if (source == Source::kEnd) on_end(worker);
  if (source == Source::kOutput) worker.read_output();
  if (source == Source::kErrors) worker.read_errors();
  if (source == Source::kProgress) {
    worker.read_progress([&](std::string_view line) { on_progress(worker, line); });
  }
}

void Attempt::on_end(Worker& worker) {
  const auto status = worker.child().poll_exit();
  if (!status || worker.ended()) return;
  worker.set_ended();
  const TimePoint now = context_.executor.now();
  // A worker that is preempted without handling the signal ends by it; with SIGTERM, any end is an answer.
  const bool preempted = preempted_by_ == SIGTERM || (preempted_by_ != 0 && status->signal == preempted_by_);
  const bool asked = stopping_ || preempted;
  endings_.push_back({worker.rank(), worker.name(), worker.child().pid(), status->code, status->signal, asked,
                      now - began_});
  const bool failed = endings_.back().failed();
  view_.set_state(worker.rank(), !failed ? WorkerState::kDone
                                 : asked ? WorkerState::kStopped
                                         : WorkerState::kFailed);
  if (!asked && (failed || !until_.leave.is_never())) {
    until_.settle = earlier(until_.settle, Deadline(now + kSettleTime));
  }
  if (all_ended()) until_.drain = Deadline(now + kDrainTime);
}

void Attempt::on_progress(const Worker& worker, std::string_view line) {
  if (auto report = decode_progress(line)) {
    view_.set_report(worker.rank(), std::move(*report));
  } else if (const auto signal = decode_preemption(line)) {
    reporters_.at(static_cast<std::size_t>(worker.rank())) = true;
    // The launcher's own SIGTERM is reported, too.
    if (!stopping_ && preempted_by_ == 0) reported_signal_ = *signal;
  }
}

int Attempt::take_reported_signal() { return std::exchange(reported_signal_, 0); }

void Attempt::stop(int signal) {
  const bool again = stopping_;
  stopping_ = true;
  until_.settle = Deadline::never();
  until_.kill = earlier(until_.kill, context_.executor.deadline_in(context_.options.grace));
  for (const auto& worker : workers_) {
    if (worker->ended()) continue;
    worker->child().signal_group(signal);
    worker->child().signal_group(SIGCONT);  // a stopped process handles no other signal
    if (!again) view_.set_state(worker->rank(), WorkerState::kStopping);
  }
}

void Attempt::preempt(int signal) {
  if (stopping_) return;
  const bool first = preempted_by_ == 0;
  preempted_by_ = signal;
  if (first) until_.kill = context_.executor.deadline_in(context_.options.preemption.grace);
  for (const auto& worker : workers_) {
    if (worker->ended()) continue;
    if (!reporters_.at(static_cast<std::size_t>(worker->rank()))) {
      if (signal == SIGTERM) {
        worker->child().signal_group(signal);
      } else {
        worker->child().signal_process(signal);
      }
    }
    worker->child().signal_group(SIGCONT);
    view_.set_state(worker->rank(), WorkerState::kStopping);
  }
}

void Attempt::kill_workers() {
  until_.kill = Deadline::never();
  for (const auto& worker : workers_) {
    if (!worker->ended()) worker->child().signal_group(SIGKILL);
  }
}

void Attempt::note_blames() {
  for (Ending& ending : endings_) ending.blames = blamed_process(worker(ending.rank).recent_lines());
}

/// Whether the first failure and its consequences have been seen, or the time to wait for them is over.
void Attempt::settle(TimePoint now) {
  note_blames();
  const Duration grace = context_.options.grace;
  if (const Worker* leaving = find_leaving(endings_, workers_)) {
    if (until_.leave.is_never()) until_.leave = context_.executor.deadline_in(grace);
    if (!until_.leave.passed(now)) {
      until_.settle = until_.leave;
      return;
    }
    context_.display.say(fmt::format(
        "torchspan: {} (rank {}, pid {}) has left the job, but its process still runs {:.1f} s later\n",
        leaving->name(), leaving->rank(), leaving->child().pid(), to_seconds(grace)));
  }
  const Ending& first = endings_.at(first_failure(endings_).value());
  if (!all_ended()) {
    context_.display.say(fmt::format("torchspan: {} (rank {}, pid {}) {}; stopping the others\n", first.name,
                                     first.rank, first.pid, describe_failure(first)));
  }
  stop(SIGTERM);
}

/// Processes that the workers started still hold their pipes: kills them, and closes the pipes if even that
/// does not end them.
void Attempt::end_leftovers(TimePoint now) {
  for (const auto& worker : workers_) {
    worker->child().signal_group(SIGKILL);
    if (leftovers_killed_) worker->close_streams();
  }
  kill_processes_of(context_.executor, setting_.run_id);
  leftovers_killed_ = true;
  until_.drain = Deadline(now + kDrainTime);
}

void Attempt::advance(TimePoint now) {
  if (until_.settle.passed(now)) settle(now);
  if (all_ended()) {
    if (until_.drain.passed(now)) end_leftovers(now);
  } else if (until_.kill.passed(now)) {
    kill_workers();
  }
  view_.show(now);
}

Deadline Attempt::next_deadline() const {
  return earlier(earlier(until_.settle, all_ended() ? until_.drain : until_.kill), view_.next());
}

void Attempt::finish() {
  // Processes that outlive a worker may still hold its progress pipe, so its end was not waited for.
  for (const auto& worker : workers_) {
    worker->read_progress([&](std::string_view line) { on_progress(*worker, line); });
  }
  view_.finish();
  note_blames();
}

}  // namespace torchspan::launch
