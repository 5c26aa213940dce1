#include "rpc/agent/graceful_shutdown.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <span>
#include <utility>

namespace torchspan::rpc {

std::string ShutdownWait::news(const std::string& unfinished) {
  const TimePoint now = runtime_.executor.now();
  if (unfinished.empty() || now - logged_ < kReportInterval) return "";
  logged_ = now;
  return unfinished;
}

void ShutdownWait::heard(std::map<std::string, std::string> news, std::uint64_t busy) {
  for (auto& [worker, work] : news) {
    if (!work.empty()) continue;
    const auto known = others_.find(worker);
    work = known == others_.end() ? "still has work" : known->second;
  }
  others_ = std::move(news);
  more_ = busy - std::min<std::uint64_t>(busy, others_.size());
}

std::string ShutdownWait::work(const std::string& unfinished) const {
  constexpr std::size_t kMost = 8;
  std::string text = unfinished.empty() ? "" : "this worker " + unfinished;
  std::size_t named = 0;
  for (const auto& [worker, work] : others_) {
    if (named == kMost) break;
    ++named;
    text += fmt::format("{}worker '{}' {}", text.empty() ? "" : "; ", worker, work);
  }
  const std::uint64_t more = others_.size() - named + more_;
  if (more > 0) text += fmt::format("; and {} more workers have work", more);
  return text;
}

void ShutdownWait::warn(const std::string& unfinished) {
  if (!is_due()) return;
  if (const std::string text = work(unfinished); !text.empty()) say(text);
}

void ShutdownWait::warn_of_missing(const std::string& names, bool serving, std::uint64_t handled) {
  const TimePoint now = runtime_.executor.now();
  if (serving || handled != handled_) {
    handled_ = handled;
    served_at_ = now;
    return;
  }
  if (now - served_at_ < patience_) return;
  patience_ *= 2;
  say(fmt::format("these workers have not called shutdown() or have unfinished work: {}", names));
}

void ShutdownWait::say(const std::string& what) {
  warned_ = runtime_.executor.now();
  runtime_.log.warning(
      fmt::format("{} has waited {:.0f} s: {}", operation_, to_seconds(warned_ - began_), what));
}

namespace {

constexpr Duration kQuietCheck = std::chrono::milliseconds(2);
/// How many values a report of leaks names.
constexpr std::size_t kLeakLines = 20;
/// How many missing workers a warning names.
constexpr std::size_t kMostNamed = 16;
constexpr const char* kTag = "rpc.shutdown";
/// Precedes a worker's name in texts for that worker itself; the store writes it too.
constexpr std::string_view kThisWorker = "this worker, ";

/// The first byte of a busy worker's note, before its news: an empty note is that of an idle worker.
constexpr std::byte kBusy{1};

Bytes note_of(bool busy, const std::string& news) {
  if (!busy) return {};
  ByteWriter writer;
  writer.put(kBusy);
  writer.put_bytes(std::as_bytes(std::span(news)));
  return writer.take();
}

std::string news_in(BytesView note) {
  const BytesView news = note.subspan(std::min<std::size_t>(note.size(), 1));
  return {reinterpret_cast<const char*>(news.data()), news.size()};
}

/// Returns why a worker leaves after a failed shutdown. If another worker left first, that is its reason.
std::string last_lines(const Error& failure) {
  constexpr std::string_view kBecause = " left because ";
  std::string text = failure.message();
  if (const auto self = text.find(kThisWorker); self != std::string::npos)
    text.erase(self, kThisWorker.size());
  if (failure.kind() != ErrorKind::kDisconnected) return "left because its shutdown() failed: " + text;
  const auto last = text.rfind(kBecause);
  const std::string cause = last == std::string::npos ? text : text.substr(last + kBecause.size());
  return "left because " + (cause.starts_with("its ") ? text : cause);
}

/// Joins the first of the lines into one line.
std::string in_short(const std::vector<std::string>& lines) {
  constexpr std::size_t kMost = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(lines.size(), kMost); ++i) text += (i == 0 ? "" : ", ") + lines[i];
  return lines.size() <= kMost ? text : text + fmt::format(", and {} more", lines.size() - kMost);
}

/// Keeps the deadline of a shutdown, which is earlier while nothing is sent or handled.
class QuietLimit {
 public:
  QuietLimit(Runtime& runtime, Duration limit, Deadline deadline)
      : executor_(runtime.executor), limit_(limit), deadline_(deadline), until_(deadline) {}
  /// Records what all workers have sent and handled so far.
  void heard(const Totals& totals) {
    if (limit_ == Duration::zero() || (totals.sent == sent_ && totals.handled == handled_)) return;
    sent_ = totals.sent;
    handled_ = totals.handled;
    until_ = earlier(deadline_, executor_.deadline_in(limit_));
  }
  Deadline until() const { return until_; }

 private:
  Executor& executor_;
  const Duration limit_;
  const Deadline deadline_;
  Deadline until_;
  std::optional<std::uint64_t> sent_, handled_;
};

}  // namespace

std::vector<std::string> leak_lines(const std::vector<RRefInfo>& leaks) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < std::min(leaks.size(), kLeakLines); ++i) lines.push_back(leaks[i].str());
  if (leaks.size() > kLeakLines) lines.push_back(fmt::format("and {} more", leaks.size() - kLeakLines));
  return lines;
}

std::string unfinished_work(const AgentState& state) {
  const TimePoint now = state.runtime.executor.now();
  std::vector<std::string> lines = state.serving.unfinished(now, state.peers);
  for (const DebugInfo::Pending& call : state.calls.describe(now, state.peers)) {
    lines.push_back(
        fmt::format("waits {:.1f} s for '{}' on worker '{}'", to_seconds(call.age), call.call, call.to));
  }
  if (lines.empty() && !state.references->settled())
    lines.push_back("waits for others to confirm references");
  if (lines.empty() && state.continuations->pool().busy()) lines.push_back("runs continuations of futures");
  return in_short(lines);
}

GracefulShutdown::GracefulShutdown(AgentState& state, std::shared_ptr<rendezvous::Membership> membership,
                                   const Hooks& hooks)
    : state_(state),
      runtime_(state.runtime),
      membership_(std::move(membership)),
      hooks_(hooks),
      wait_(runtime_) {}

GracefulShutdown::Outcome GracefulShutdown::run(Deadline deadline) {
  Outcome outcome;
  try {
    outcome.leaks = leave_world(deadline);
  } catch (...) {
    const Error failure = to_error(std::current_exception());
    outcome.failure =
        Error(failure.kind(), fmt::format("worker '{}' stopped without waiting for all others: {}",
                                          state_.self.name, describe_failure(failure)));
    outcome.last_lines = last_lines(failure);
  }
  return outcome;
}

std::vector<RRefInfo> GracefulShutdown::leave_world(Deadline deadline) {
  for (const auto& hook : hooks_) wait_for_hook(hook(), deadline);
  if (membership_ && membership_->open()) return leave_open_world(deadline);
  if (membership_ && membership_->world_size() > 1) return leave_fixed_world(deadline);
  leave_world_of_one(deadline);
  return {};
}

Totals GracefulShutdown::totals() const {
  return {state_.sent.load(), state_.handled.load(),
          state_.calls.size() != 0 || state_.running.load() != 0 || state_.continuations->pool().busy() ||
              !state_.references->settled()};
}

/// Waits a short time for this worker's own work to end. Returns false if some is left.
bool GracefulShutdown::wait_until_quiet(Deadline deadline) {
  const Deadline round = earlier(deadline, runtime_.executor.deadline_in(std::chrono::milliseconds(100)));
  while (totals().busy) {
    if (round.passed(runtime_.executor.now())) return false;
    runtime_.executor.sleep(kQuietCheck);
  }
  return true;
}

/// Runs one round: returns the totals of all workers. Warns of what it waits for.
Totals GracefulShutdown::exchange_totals(Deadline deadline) {
  const std::string work = totals().busy ? unfinished() : "";
  wait_.warn(work);
  const auto warn = [&](const std::vector<rendezvous::Member>& missing) {
    std::string names;
    for (std::size_t i = 0; i < std::min(missing.size(), kMostNamed); ++i)
      names += (names.empty() ? "" : ", ") + rendezvous::describe(missing[i]);
    if (missing.size() > kMostNamed) names += fmt::format(" and {} more", missing.size() - kMostNamed);
    const bool serving = state_.calls.size() != 0 || state_.serving.awaited(runtime_.executor.now());
    wait_.warn_of_missing(names, serving, state_.handled.load());
  };
  const Totals mine = totals();
  const rendezvous::CountSums sums = membership_->sum(
      kTag, {mine.sent, mine.handled}, note_of(mine.busy, wait_.news(work)), {},
      rendezvous::Membership::Wait{.until = deadline, .every = ShutdownWait::kEvery, .report = warn});
  std::map<std::string, std::string> news;
  const std::uint64_t busy_others = sums.noted - (mine.busy ? 1 : 0);
  for (const auto& note : sums.notes) {
    if (note.rank == static_cast<int>(state_.self.rank)) continue;
    news[state_.peers.name(static_cast<std::uint32_t>(note.rank))] = news_in(note.bytes);
  }
  wait_.heard(std::move(news), busy_others);
  return {sums.counts.at(0), sums.counts.at(1), sums.noted > 0};
}

/// Returns when no worker was busy in two consecutive rounds and nothing was sent or handled between them.
/// Then no message is in flight either, because a request is outstanding at its sender until it is answered.
/// With `list`, returns the values that other workers referred to at that moment; when this returns, some of
/// them may have released theirs.
std::vector<RRefInfo> GracefulShutdown::agree_on_quiet(Deadline deadline, bool list) {
  std::vector<RRefInfo> held;
  Totals before;
  QuietLimit limit(runtime_, state_.options.shutdown_limit, deadline);
  bool quiet_before = false;
  for (;;) {
    wait_until_quiet(limit.until());
    if (list) held = state_.references->list_owners();
    const Totals sum = exchange_totals(limit.until());
    limit.heard(sum);
    state_.references->driver().leave(false);  // all workers are in shutdown
    if (!sum.busy && quiet_before && sum.sent == before.sent && sum.handled == before.handled) return held;
    quiet_before = !sum.busy;
    before = sum;
  }
}

void GracefulShutdown::report_leaks(const char* why) {
  if (!state_.options.report_leaks) return;
  const std::vector<RRefInfo> leaks = state_.references->list_owners();
  if (leaks.empty()) return;
  runtime_.log.warning(fmt::format("{} values are destroyed although {}:", leaks.size(), why));
  for (const std::string& line : leak_lines(leaks)) runtime_.log.warning("leak: " + line);
}

/// Waits for this worker's own calls and returns its references to their owners. Requests that it serves may
/// never end; their callers get an error when it leaves. Returns the values that are leaks then.
std::vector<RRefInfo> GracefulShutdown::leave_open_world(Deadline deadline) {
  state_.references->driver().leave(true);
  QuietLimit limit(runtime_, state_.options.shutdown_limit, deadline);
  const auto wait_for = [&](const char* for_what) {
    while (state_.calls.size() != 0 || !state_.references->settled()) {
      limit.heard(totals());
      if (limit.until().passed(runtime_.executor.now())) {
        std::string unanswered;
        for (const std::string& line : state_.references->driver().outstanding())
          unanswered += fmt::format("  {}\n", line);
        const auto agent = state_.backend.lock();
        throw Error(ErrorKind::kTimedOut, fmt::format("{} did not end in time:\n{}{}", for_what, unanswered,
                                                      agent ? agent->debug().str() : ""));
      }
      wait_.warn_of([&] { return unfinished(); });
      runtime_.executor.sleep(kQuietCheck);
    }
  };
  wait_for("its calls");
  state_.references->delete_users();
  wait_for("the return of its references");
  std::vector<RRefInfo> leaks;
  if (state_.options.strict_leaks) {
    leaks = state_.references->list_owners();
  } else {
    report_leaks("other workers refer to them");
  }
  membership_->leave(deadline);
  return leaks;
}

void GracefulShutdown::wait_for_hook(const Future<void>& hook, Deadline deadline) {
  while (!hook.wait_until(earlier(deadline, runtime_.executor.deadline_in(ShutdownWait::kEvery)))) {
    if (deadline.passed(runtime_.executor.now())) break;
    const std::string work = unfinished();
    wait_.warn(work.empty() ? "has an extension that is not ready to end" : work);
  }
  hook.wait(deadline);
}

std::vector<RRefInfo> GracefulShutdown::leave_fixed_world(Deadline deadline) {
  std::vector<RRefInfo> leaks = agree_on_quiet(deadline, state_.options.strict_leaks);
  state_.references->delete_users();
  agree_on_quiet(deadline, false);
  report_leaks(
      "the references to them were not released; a worker that held them may have ended without "
      "shutdown()");
  membership_->leave(deadline);
  return leaks;
}

void GracefulShutdown::leave_world_of_one(Deadline deadline) {
  QuietLimit limit(runtime_, state_.options.shutdown_limit, deadline);
  while (!wait_until_quiet(limit.until()) && !limit.until().passed(runtime_.executor.now())) {
    limit.heard(totals());
    wait_.warn_of([&] { return unfinished(); });
  }
}

/// Describes a failed shutdown for this worker's program, with the worker's own unfinished work.
std::string GracefulShutdown::describe_failure(const Error& failure) const {
  std::string text = failure.message();
  const std::string self = membership_ ? rendezvous::describe(membership_->self()) : "";
  const auto at =
      self.empty() || text.find(kThisWorker) != std::string::npos ? std::string::npos : text.find(self);
  if (at != std::string::npos) text.insert(at, kThisWorker);
  const bool late = failure.kind() == ErrorKind::kTimedOut;
  const bool serves = failure.kind() == ErrorKind::kDisconnected && !state_.serving.all().empty();
  const std::string work = late ? wait_.work(unfinished()) : serves ? "this worker " + unfinished() : "";
  return work.empty() ? text : fmt::format("{}; {}", text, work);
}

}  // namespace torchspan::rpc
