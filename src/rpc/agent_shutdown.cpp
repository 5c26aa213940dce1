#include <algorithm>
#include <fmt/format.h>
#include <optional>

#include "rpc/agent.h"

namespace torchspan::rpc {
namespace {

constexpr Duration kQuietCheck = std::chrono::milliseconds(2);
/// Values that a report of leaks names.
constexpr std::size_t kLeakLines = 20;
constexpr const char* kTag = "rpc.shutdown";
/// Goes before a worker's name where it reads of itself; the store says so too.
constexpr std::string_view kThisWorker = "this worker, ";

/// What a worker tells the others in a round.
struct Report {
  Totals totals;
  std::string news;  ///< of its unfinished work, now and then
};

Bytes to_bytes(const Report& report) {
  ByteWriter writer;
  writer.put(report.totals.sent);
  writer.put(report.totals.handled);
  writer.put(report.totals.busy);
  writer.put_string(report.news);
  return writer.take();
}

Report from_bytes(BytesView bytes) {
  ByteReader reader(bytes);
  Report report;
  report.totals.sent = reader.get<std::uint64_t>();
  report.totals.handled = reader.get<std::uint64_t>();
  report.totals.busy = reader.get<bool>();
  report.news = reader.get_string();
  return report;
}

/// Why a worker left whose shutdown failed; of one that left because another did, that one's reason.
std::string last_words(const Error& failure) {
  constexpr std::string_view kBecause = " left because ";
  std::string text = failure.message();
  if (const auto self = text.find(kThisWorker); self != std::string::npos)
    text.erase(self, kThisWorker.size());
  if (failure.kind() != ErrorKind::kDisconnected) return "left because its shutdown() failed: " + text;
  const auto last = text.rfind(kBecause);
  const std::string cause = last == std::string::npos ? text : text.substr(last + kBecause.size());
  return "left because " + (cause.starts_with("its ") ? text : cause);
}

/// The first of them in one line.
std::string in_short(const std::vector<std::string>& lines) {
  constexpr std::size_t kMost = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(lines.size(), kMost); ++i) text += (i == 0 ? "" : ", ") + lines[i];
  return lines.size() <= kMost ? text : text + fmt::format(", and {} more", lines.size() - kMost);
}

/// One line for each of the first values.
std::vector<std::string> lines(const std::vector<RRefInfo>& leaks) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < std::min(leaks.size(), kLeakLines); ++i) lines.push_back(leaks[i].str());
  if (leaks.size() > kLeakLines) lines.push_back(fmt::format("and {} more", leaks.size() - kLeakLines));
  return lines;
}

/// The deadline of a shutdown, brought forward while nothing is sent or handled.
class QuietLimit {
 public:
  QuietLimit(Runtime& runtime, Duration limit, Deadline deadline)
      : executor_(runtime.executor), limit_(limit), deadline_(deadline), until_(deadline) {}
  /// What all workers have sent and handled by now.
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

/// Waits a moment for this worker's own work to end; false when some is still going on.
bool RpcAgent::wait_until_quiet(Deadline deadline) {
  const Deadline round = earlier(deadline, runtime_.executor.deadline_in(std::chrono::milliseconds(100)));
  while (totals().busy) {
    if (round.passed(runtime_.executor.now())) return false;
    runtime_.executor.sleep(kQuietCheck);
  }
  return true;
}

std::string RpcAgent::unfinished() const {
  const TimePoint now = runtime_.executor.now();
  std::vector<std::string> lines = serving_.unfinished(now, roster_);
  for (const DebugInfo::Pending& call : calls_.describe(now, roster_)) {
    lines.push_back(
        fmt::format("waits {:.1f} s for '{}' on worker '{}'", to_seconds(call.age), call.call, call.to));
  }
  if (lines.empty() && !references_->settled()) lines.push_back("waits for others to confirm references");
  if (lines.empty() && host_->pool().busy()) lines.push_back("runs continuations of futures");
  return in_short(lines);
}

/// One round: what everybody reports, by rank. Meanwhile says what it waits for.
std::vector<Bytes> RpcAgent::exchange_totals(Deadline deadline, ShutdownWait& wait) {
  const std::string work = totals().busy ? unfinished() : "";
  wait.warn(work);
  const auto tell = [&](const std::vector<rendezvous::Member>& missing) {
    std::string names;
    for (const rendezvous::Member& member : missing)
      names += (names.empty() ? "" : ", ") + rendezvous::describe(member);
    const bool serving = calls_.size() != 0 || serving_.awaited(runtime_.executor.now());
    wait.warn_of_missing(names, serving, handled_.load());
  };
  return membership_->all_gather_bytes(
      kTag, to_bytes({totals(), wait.news(work)}), {},
      rendezvous::Membership::Wait{.until = deadline, .every = ShutdownWait::kEvery, .tell = tell});
}

/// Returns when in two rounds running no worker was busy and nothing was sent or handled between them: then
/// no message is on its way either, since every request is outstanding at its sender until it is answered.
/// Gives, if asked for, the values that others referred to at that moment: some workers may be further on
/// when this returns here.
std::vector<RRefInfo> RpcAgent::agree_on_quiet(Deadline deadline, bool list, ShutdownWait& wait) {
  std::vector<RRefInfo> held;
  Totals before;
  QuietLimit limit(runtime_, options_.shutdown_limit, deadline);
  bool quiet_before = false;
  for (;;) {
    wait_until_quiet(limit.until());
    if (list) held = references_->list_owners();
    Totals sum;
    std::uint32_t rank = 0;
    for (const Bytes& bytes : exchange_totals(limit.until(), wait)) {
      const Report one = from_bytes(bytes);
      sum.sent += one.totals.sent;
      sum.handled += one.totals.handled;
      sum.busy = sum.busy || one.totals.busy;
      if (rank != self_.rank) wait.heard(roster_.name(rank), one.totals.busy, one.news);
      ++rank;
    }
    limit.heard(sum);
    references_->leave(false);  // all have come this far: nobody serves on
    if (!sum.busy && quiet_before && sum.sent == before.sent && sum.handled == before.handled) return held;
    quiet_before = !sum.busy;
    before = sum;
  }
}

void RpcAgent::report_leaks(const char* why) {
  if (!options_.report_leaks) return;
  const std::vector<RRefInfo> leaks = references_->list_owners();
  if (leaks.empty()) return;
  runtime_.log.warning(fmt::format("{} values end though {}:", leaks.size(), why));
  for (const std::string& line : lines(leaks)) runtime_.log.warning("leak: " + line);
}

void RpcAgent::throw_leaks(const std::vector<RRefInfo>& leaks) const {
  if (leaks.empty()) return;
  std::string text = fmt::format(
      "worker '{}' was shut down while others referred to {} of its values (strict_leaks); let go of these "
      "RRefs before shutdown():",
      self_.name, leaks.size());
  for (const std::string& line : lines(leaks)) text += "\n  " + line;
  throw Error(ErrorKind::kInvalid, text);
}

/// Nobody else stops: what this worker began ends, and its references go back to their owners. What it serves
/// for others may never end; their calls fail as it leaves. Gives the values that are to be leaks then.
std::vector<RRefInfo> RpcAgent::leave_open_world(Deadline deadline, ShutdownWait& wait) {
  references_->leave(true);
  QuietLimit limit(runtime_, options_.shutdown_limit, deadline);
  auto wait_for = [&](const char* for_what) {
    while (calls_.size() != 0 || !references_->settled()) {
      limit.heard(totals());
      if (limit.until().passed(runtime_.executor.now())) {
        std::string letters;
        for (const std::string& line : references_->outstanding()) letters += fmt::format("  {}\n", line);
        throw Error(ErrorKind::kTimedOut,
                    fmt::format("{} did not end in time:\n{}{}", for_what, letters, debug().str()));
      }
      wait.warn_of([&] { return unfinished(); });
      runtime_.executor.sleep(kQuietCheck);
    }
  };
  wait_for("its calls");
  references_->delete_users();
  wait_for("the return of its references");
  std::vector<RRefInfo> leaks;
  if (options_.strict_leaks) {
    leaks = references_->list_owners();
  } else {
    report_leaks("other workers refer to them");
  }
  membership_->leave(deadline);
  return leaks;
}

void RpcAgent::wait_for_hook(const Future<void>& hook, Deadline deadline, ShutdownWait& wait) {
  for (;;) {
    try {
      return hook.wait(earlier(deadline, runtime_.executor.deadline_in(ShutdownWait::kEvery)));
    } catch (const Error&) {
      if (hook.done()) return hook.wait();
      if (deadline.passed(runtime_.executor.now())) throw;
    }
    const std::string work = unfinished();
    wait.warn(work.empty() ? "has an extension that is not ready to end" : work);
  }
}

void RpcAgent::leave_world(Deadline deadline, ShutdownWait& wait, std::vector<RRefInfo>& leaks) {
  for (const auto& hook : shutdown_hooks_) wait_for_hook(hook(), deadline, wait);
  if (membership_ && membership_->open()) {
    leaks = leave_open_world(deadline, wait);
  } else if (membership_ && membership_->world_size() > 1) {
    leaks = agree_on_quiet(deadline, options_.strict_leaks, wait);
    references_->delete_users();
    agree_on_quiet(deadline, false, wait);
    report_leaks(
        "the references to them were not released; a worker that held them may have ended without "
        "shutdown()");
    membership_->leave(deadline);
  } else {
    QuietLimit limit(runtime_, options_.shutdown_limit, deadline);
    while (!wait_until_quiet(limit.until()) && !limit.until().passed(runtime_.executor.now())) {
      limit.heard(totals());
      wait.warn_of([&] { return unfinished(); });
    }
  }
}

/// A failure of shutdown() as this worker's program reads it: with what kept it, and itself as itself.
std::string RpcAgent::tell_failure(const Error& failure, const ShutdownWait& wait) const {
  std::string text = failure.message();
  const std::string self = membership_ ? rendezvous::describe(membership_->self()) : "";
  const auto at =
      self.empty() || text.find(kThisWorker) != std::string::npos ? std::string::npos : text.find(self);
  if (at != std::string::npos) text.insert(at, kThisWorker);
  const bool late = failure.kind() == ErrorKind::kTimedOut;
  const bool serves = failure.kind() == ErrorKind::kDisconnected && !serving_.all().empty();
  const std::string work = late ? wait.work(unfinished()) : serves ? "this worker " + unfinished() : "";
  return work.empty() ? text : fmt::format("{}; {}", text, work);
}

void RpcAgent::shutdown(Deadline deadline) {
  if (shut_down_.exchange(true) || stopping_.load()) return;
  std::optional<Error> failure;
  std::string story, why = "left";
  std::vector<RRefInfo> leaks;
  ShutdownWait wait(runtime_);
  try {
    leave_world(deadline, wait, leaks);
  } catch (...) {
    failure = to_error(std::current_exception());
    story = tell_failure(*failure, wait);
    why = last_words(*failure);
  }
  stop(why);
  if (!failure) return throw_leaks(leaks);
  throw Error(failure->kind(),
              fmt::format("worker '{}' stopped without waiting for all others: {}", self_.name, story));
}

/// Waits for the handlers that still run: nothing can end them.
void RpcAgent::stop_pool() {
  const std::unique_ptr<Parker> done = runtime_.executor.make_parker();
  Thread teller;
  const auto end = [&](Parker* parker) {
    parker->unpark();
    teller.join();
  };
  const std::unique_ptr<Parker, decltype(end)> until_the_end(done.get(), end);
  if (const auto calls = serving_.describe(runtime_.executor.now(), roster_);
      std::any_of(calls.begin(), calls.end(), [](const auto& call) { return call.begun; })) {
    try {
      teller = runtime_.executor.spawn(self_.name + "/stop", [&] {
        ShutdownWait wait(runtime_, "stop()");
        while (!done->park(runtime_.executor.deadline_in(ShutdownWait::kEvery))) wait.warn(unfinished());
      });
    } catch (const Error&) {  // no thread to be had: nobody says what it waits for
    }
  }
  host_->pool().stop();
}

}  // namespace torchspan::rpc
