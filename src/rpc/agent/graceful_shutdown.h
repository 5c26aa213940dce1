#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/rendezvous/membership.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/shutdown_wait.h"

namespace torchspan::rpc {

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
