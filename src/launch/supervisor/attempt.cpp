#include "launch/supervisor/attempt.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fmt/format.h>
#include <functional>

#include <torchspan/core/preemption.h>

namespace torchspan::launch {
namespace {

/// How long the launcher waits for output of processes that outlive their worker.
constexpr Duration kDrainTime = std::chrono::seconds(1);

/// Returns the worker whose end another one reports and whose process still runs: it is exiting, and its exit
/// code will follow.
const Worker* find_leaving(const std::vector<Ending>& endings,
                           const std::vector<std::unique_ptr<Worker>>& workers,
                           const std::function<int(const Worker&)>& rank_of) {
  for (const Ending& ending : endings) {
    if (ending.replaced) continue;
    for (const auto& worker : workers) {
      const RankProcess process{rank_of(*worker), worker->child().pid()};
      if (!worker->ended() && process == ending.blames) return worker.get();
    }
  }
  return nullptr;
}

void note_blames(std::vector<Ending>& endings, const WorkerSet& workers) {
  for (Ending& ending : endings) ending.blames = blamed_process(workers.find(ending.pid)->recent_lines());
}

}  // namespace

Attempt::Attempt(const AttemptContext& context, JobSetting setting)
    : context_(context),
      setting_(std::move(setting)),
      began_(context.executor.now()),
      view_(context.display, Board(setting_.workers, setting_.rank_of(0)), began_),
      replacements_(context.options.restarts, context.replacements_used),
      reporters_(static_cast<std::size_t>(setting_.workers), false) {}

void Attempt::start() {
  for (int rank = 0; rank < setting_.workers; ++rank) workers_.start(rank, 0);
}

int Attempt::started() const { return std::min(static_cast<int>(workers_.all().size()), setting_.workers); }

bool Attempt::all_ended() const {
  return endings_.size() == workers_.all().size() && !replacements_.waiting();
}

bool Attempt::over() const { return all_ended() && workers_.silent() && !watch_.is_examining(); }

void Attempt::handle(const Poller::Event& event) {
  const auto source = static_cast<Source>(event.token >> 32);
  if (source == Source::kState) return watch_.handle(event);
  Worker& worker = workers_.at(static_cast<std::uint32_t>(event.token));
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
  const bool asked = stopping_ || killed_ || preempted;
  endings_.push_back({.rank = setting_.rank_of(worker.rank()),
                      .name = worker.name(),
                      .pid = worker.child().pid(),
                      .code = status->code,
                      .signal = status->signal,
                      .asked = asked,
                      .after = now - began_,
                      .incarnation = worker.incarnation(),
                      .ran = now - worker.began()});
  const bool failed = endings_.back().failed();
  view_.set_state(worker.rank(), !failed ? WorkerState::kDone
                                 : asked ? WorkerState::kStopped
                                         : WorkerState::kFailed);
  if (!asked && (failed || !until_.leave.is_never())) {
    until_.settle = earlier(until_.settle, Deadline(now + kSettleTime));
  }
  if (worker.rank() == 0 && !failed) stop_replacing();  // the store ends with rank 0
  if (all_ended()) until_.drain = Deadline(now + kDrainTime);
}

void Attempt::on_progress(const Worker& worker, std::string_view line) {
  if (auto report = decode_progress(line)) {
    view_.set_report(worker.rank(), std::move(*report));
    until_.progress = context_.executor.deadline_in(context_.options.no_progress);
  } else if (const auto notice = decode_timeout(line)) {
    watch_.on_timeout(setting_.rank_of(worker.rank()), printable(*notice));
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
  stop_replacing();
  for (const auto& worker : workers_.all()) {
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
  stop_replacing();
  for (const auto& worker : workers_.all()) {
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
  killed_ = true;
  workers_.kill_running();
}

/// Plans replacements for all workers that have failed, if each of them can be replaced; else returns why not,
/// or an empty text.
std::optional<std::string> Attempt::plan_replacements(TimePoint now) {
  const auto is_new = [](const Ending& ending) {
    return ending.failed() && !ending.asked && !ending.replaced;
  };
  std::vector<Ending> failed;
  for (const Ending& ending : endings_) {
    if (is_new(ending)) failed.push_back(ending);
  }
  if (failed.empty()) return "";  // a worker blames one that ended with code 0
  if (auto reason = replacements_.plan(failed, now)) return reason;
  for (Ending& ending : endings_) {
    if (!is_new(ending)) continue;
    ending.replaced = true;
    context_.display.say(fmt::format(
        "torchspan: {} (rank {}, pid {}) {}; it starts again in {:.1f} s, and the others continue "
        "(replacement {} of {})\n",
        ending.name, ending.rank, ending.pid, describe(ending),
        to_seconds(replacements_.start_of(ending.rank) - now), replacements_.used(),
        context_.options.restarts.most_replacements));
  }
  return std::nullopt;
}

/// Starts the worker of a rank again, after the end of all that its predecessor started.
void Attempt::replace(int rank) {
  const auto last = std::find_if(endings_.rbegin(), endings_.rend(),
                                 [&](const Ending& ending) { return ending.rank == rank; });
  workers_.kill_leftovers_of(*workers_.find(last->pid));
  reporters_.at(static_cast<std::size_t>(rank)) = false;
  try {
    workers_.start(rank, replacements_.incarnation(rank));
    view_.set_state(rank, WorkerState::kRunning);
  } catch (const Error& error) {
    context_.display.say(fmt::format("torchspan: {} cannot be started again: {}; stopping the others\n",
                                     last->name, error.message()));
    last->replaced = false;
    stop(SIGTERM);
  }
}

/// From now on, workers that have failed stay away; those that waited for a replacement are not failures if
/// the others succeed without them.
void Attempt::stop_replacing() {
  for (const int rank : replacements_.stop()) {
    context_.display.say(fmt::format("torchspan: {}{} is not started again: the job is ending\n",
                                     context_.options.name_prefix, rank));
  }
  if (all_ended()) until_.drain = context_.executor.deadline_in(kDrainTime);
}

/// Whether the first failure and its consequences have been seen, or the time to wait for them is over.
void Attempt::settle(TimePoint now) {
  note_blames(endings_, workers_);
  const Duration grace = context_.options.grace;
  if (const Worker* leaving = find_leaving(endings_, workers_.all(), [this](const Worker& worker) {
        return setting_.rank_of(worker.rank());
      })) {
    if (until_.leave.is_never()) until_.leave = context_.executor.deadline_in(grace);
    if (!until_.leave.passed(now)) {
      until_.settle = until_.leave;
      return;
    }
    context_.display.say(fmt::format(
        "torchspan: {} (rank {}, pid {}) has left the job, but its process still runs {:.1f} s later\n",
        leaving->name(), setting_.rank_of(leaving->rank()), leaving->child().pid(), to_seconds(grace)));
  }
  const auto against = plan_replacements(now);
  if (!against) {
    until_.settle = until_.leave = Deadline::never();
    return;
  }
  const Ending& first = endings_.at(first_failure(endings_).value());
  if (!all_ended()) {
    context_.display.say(fmt::format("torchspan: {} (rank {}, pid {}) {}; stopping the others{}{}\n",
                                     first.name, first.rank, first.pid, describe_failure(first),
                                     against->empty() ? "" : ": ", *against));
  }
  stop(SIGTERM);
}

/// Processes that the workers started still hold their pipes: kills them, and closes the pipes if even that
/// does not end them.
void Attempt::end_leftovers(TimePoint now) {
  workers_.kill_leftovers(leftovers_killed_);
  leftovers_killed_ = true;
  until_.drain = Deadline(now + kDrainTime);
}

void Attempt::advance(TimePoint now) {
  watch_.advance(now);
  if (until_.settle.passed(now) && !watch_.is_examining()) settle(now);
  if (all_ended()) {
    if (until_.drain.passed(now)) end_leftovers(now);
  } else if (until_.kill.passed(now)) {
    kill_workers();
  }
  for (const int rank : replacements_.take_due(now)) replace(rank);
  if (until_.progress.passed(now)) say_no_progress();
  view_.show(now);
}

/// Once, until the next report: all workers are alike here, because in a job that waits none of them reports.
void Attempt::say_no_progress() {
  until_.progress = Deadline::never();
  if (stopping_ || preempted_by_ != 0 || !endings_.empty()) return;
  const auto folder = std::filesystem::path(setting_.runtime_folder).parent_path();
  context_.display.say(fmt::format("torchspan: no progress for {:.0f} s: torchspan stacks {}\n",
                                   to_seconds(context_.options.no_progress), folder.string()));
}

Deadline Attempt::next_deadline() const {
  const Deadline end = all_ended() ? until_.drain : until_.kill;
  const Deadline settle = watch_.is_examining() ? Deadline::never() : until_.settle;
  const Deadline shown = earlier(until_.progress, view_.next());
  return earlier(earlier(earlier(settle, end), earlier(replacements_.next(), watch_.next())), shown);
}

std::vector<Incident> Attempt::finish() {
  // Processes that outlive a worker may still hold its progress pipe, so its end was not waited for.
  for (const auto& worker : workers_.all()) {
    worker->read_progress([&](std::string_view line) { on_progress(*worker, line); });
  }
  watch_.finish();
  view_.finish();
  note_blames(endings_, workers_);
  return watch_.incidents();
}

}  // namespace torchspan::launch
