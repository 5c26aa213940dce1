#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "launch/supervisor/endings.h"

namespace torchspan::launch {

/// What the launcher of one host tells those of the other hosts in each round (see NodeRounds).
struct NodeState {
  enum class Phase : std::uint8_t {
    kReady,    ///< no process of an earlier attempt is left on this host
    kRunning,  ///< it has started the workers of the attempt
    kEnded,    ///< no process of the attempt is left on this host
  };
  /// Why the attempt fails on this host by itself.
  struct Failure {
    AttemptResult result;
    std::string text;  ///< "worker3 (rank 3, pid 17) exited with code 1"
  };

  int attempt = 0;  ///< from 0
  Phase phase = Phase::kReady;
  std::uint16_t store_port = 0;  ///< of the workers' store; counts on host 0
  int signal = 0;                ///< that the launcher got, or 0; stays once it is set
  std::string options;           ///< those that must be equal on all hosts, as they are written
  std::string questions = {};    ///< where its HostLink accepts questions; empty: nowhere
  std::optional<Failure> failure = {};
};

/// The states of all hosts in one round, by node rank.
using NodeStates = std::vector<NodeState>;

/// At most 32 KiB: shortens texts.
Bytes encode_node_state(const NodeState& state);
/// Returns nullopt for anything that encode_node_state() does not return. Replaces control characters in texts. Pure;
/// accepts any bytes.
std::optional<NodeState> decode_node_state(BytesView bytes);

/// Whether all hosts have reached a phase of an attempt.
bool all_reached(const NodeStates& states, int attempt, NodeState::Phase phase);

/// Returns the host whose failure ends an attempt for all: the first one that failed, in seconds since its own start.
/// Crashes (SIGKILL, SIGSEGV, …) precede other failures, which the death of a peer can cause. Nullopt if none failed.
std::optional<int> first_failed_node(const NodeStates& states, int attempt);

/// Returns an error text if the options of two hosts differ; empty if they are equal.
std::string describe_difference(const NodeStates& states);

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
