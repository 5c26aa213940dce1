#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "launch/supervisor/node_state.h"

namespace torchspan::launch {

/// How the launchers of a job's hosts connect.
struct NodeMeeting {
  rendezvous::TransportFactory transports;
  rendezvous::MembershipOptions
      join;  ///< of an open world, whose ranks are the hosts; `timeout`: of the meeting
  int nodes = 2;
  Duration every = std::chrono::milliseconds(250);  ///< from one round to the next
  /// Called on the thread of the rounds when this launcher has joined; returns NodeState::questions.
  std::function<std::string(const rendezvous::Membership& world)> joined = {};
};

/// The states of all hosts' launchers, gathered in rounds: all launchers see the same rounds in the same order, so they
/// decide alike. A thread takes part in the rounds; the other functions do not block. Thread-safe.
class NodeRounds {
 public:
  /// Starts to connect to the others. Until all have met, host 0 logs the connections that it rejects. `changed` is called
  /// on the thread when take() or failure() has something new.
  NodeRounds(Executor& executor, NodeMeeting meeting, std::function<void()> changed);
  /// Leaves after a round with the last state, within some seconds.
  ~NodeRounds();
  NodeRounds(const NodeRounds&) = delete;

  /// Sets this launcher's state for the next rounds; the rounds begin with the first call.
  void publish(const NodeState& state);
  /// Returns the rounds since the last call, oldest first.
  std::deque<NodeStates> take();
  /// Why there are no more rounds: a host that did not join, or whose launcher left or died. Take the rounds first. Its
  /// message has no control characters.
  std::optional<Error> failure();

 private:
  void run();
  void take_part();
  std::unique_ptr<rendezvous::Membership> join(Deadline until);
  void await_all(const rendezvous::Membership& world, Deadline until);
  void exchange(rendezvous::Membership& world, const NodeState& mine);
  std::optional<NodeState> next_state();

  Executor& executor_;
  Runtime runtime_;
  const NodeMeeting meeting_;
  std::string questions_;  ///< NodeState::questions; of the thread
  const std::function<void()> changed_;
  const std::unique_ptr<Parker> parker_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::optional<NodeState> mine_ TORCHSPAN_GUARDED_BY(mutex_);
  bool unsent_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::deque<NodeStates> rounds_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace torchspan::launch
