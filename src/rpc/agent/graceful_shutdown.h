#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rpc/agent/agent_state.h"

namespace torchspan::rpc {

/// Logs what shutdown() waits for: every ten seconds, the unfinished work of this worker and of others as
/// they report it. Names workers that have not called shutdown() only after nothing was asked of this worker
/// for ten seconds, then twenty, and so on, because many programs call shutdown() to serve the others until
/// they do. One thread at a time.
class ShutdownWait {
 public:
  static constexpr Duration kEvery = std::chrono::seconds(10);
  static constexpr Duration kReportInterval = std::chrono::seconds(1);

  explicit ShutdownWait(Runtime& runtime, std::string operation = "shutdown()")
      : runtime_(runtime),
        operation_(std::move(operation)),
        began_(runtime.executor.now()),
        warned_(began_),
        logged_(began_),
        served_at_(began_),
        patience_(kEvery) {}

  /// Returns this worker's unfinished work for its report to the others; empty most of the time, because
  /// every worker may receive the report.
  std::string news(const std::string& unfinished);
  /// Records the reports of a round: the news of some of the `busy` other workers that have work left, by
  /// name. Empty news keep the work reported before.
  void heard(std::map<std::string, std::string> news, std::uint64_t busy);
  /// Logs a warning if the last one is old enough and some worker has work left.
  void warn(const std::string& unfinished);
  /// The same; calls `unfinished` only if a warning is due.
  template <class F>
  void warn_of(F&& unfinished) {
    if (is_due()) warn(unfinished());
  }
  /// Warns of the workers that have not called shutdown(). `serving`: this worker has calls in progress, its
  /// own or those of callers that wait; `handled`: how many requests it has answered so far.
  void warn_of_missing(const std::string& names, bool serving, std::uint64_t handled);
  /// Returns the work left, as in "this worker …; worker 'worker1' …"; empty if there is none.
  std::string work(const std::string& unfinished) const;

 private:
  bool is_due() const { return runtime_.executor.now() - warned_ >= kEvery; }
  void say(const std::string& what);

  Runtime& runtime_;
  const std::string operation_;
  const TimePoint began_;
  TimePoint warned_, logged_, served_at_;
  Duration patience_;
  std::uint64_t handled_ = 0;
  std::map<std::string, std::string> others_;  ///< unfinished work by worker
  std::uint64_t more_ = 0;                     ///< how many others have unfinished work, too
};

/// Describes this worker's unfinished work in one line for logs; empty if there is none.
std::string unfinished_work(const AgentState& state);

/// Returns one line for each of the first values, for logs and errors.
std::vector<std::string> leak_lines(const std::vector<RRefInfo>& leaks);

/// Message totals that the workers compare to detect that no message is in flight.
struct Totals {
  std::uint64_t sent = 0;
  std::uint64_t handled = 0;
  bool busy = false;
};

/// Leaves the world: waits until the calls of all workers have ended and their references are released, then
/// leaves with the others. In an open world, it leaves alone. Run it once, from one thread.
class GracefulShutdown {
 public:
  using Hooks = std::vector<std::function<Future<void>()>>;  ///< of extensions; run first
  struct Outcome {
    std::optional<Error> failure;     ///< the error to throw
    std::string last_lines = "left";  ///< the reason that the other workers read
    std::vector<RRefInfo> leaks;      ///< strict_leaks: values that other workers still refer to
  };

  /// A null `membership` means a world of one that never joined.
  GracefulShutdown(AgentState& state, std::shared_ptr<rendezvous::Membership> membership, const Hooks& hooks);
  Outcome run(Deadline deadline);

 private:
  std::vector<RRefInfo> leave_world(Deadline deadline);
  std::vector<RRefInfo> leave_fixed_world(Deadline deadline);
  std::vector<RRefInfo> leave_open_world(Deadline deadline);
  void leave_world_of_one(Deadline deadline);
  void wait_for_hook(const Future<void>& hook, Deadline deadline);
  bool wait_until_quiet(Deadline deadline);
  Totals exchange_totals(Deadline deadline);
  std::vector<RRefInfo> agree_on_quiet(Deadline deadline, bool list);
  std::string describe_failure(const Error& failure) const;
  void report_leaks(const char* why);
  Totals totals() const;
  std::string unfinished() const { return unfinished_work(state_); }

  AgentState& state_;
  Runtime& runtime_;
  const std::shared_ptr<rendezvous::Membership> membership_;
  const Hooks& hooks_;
  ShutdownWait wait_;
};

}  // namespace torchspan::rpc
