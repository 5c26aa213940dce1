#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "launch/supervisor/restarts.h"

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

}  // namespace torchspan::launch
