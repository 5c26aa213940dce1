#pragma once
#include <memory>
#include <optional>
#include <string>

#include "launch/supervisor/host_link.h"
#include "launch/supervisor/job.h"
#include "launch/supervisor/node_rounds.h"

namespace torchspan::launch {

/// How the launcher of a host connects to those of the others. `job`: the job's options with several hosts.
NodeMeeting make_node_meeting(Executor& executor, const JobOptions& job);

/// This launcher's place among those of a job on several hosts, whose attempts start, fail and end on all hosts together.
/// Used by the launcher's thread, after each wait of the poller, which new rounds wake.
class JobNodes {
 public:
  /// The failure that ended an attempt on all hosts.
  struct Failure {
    AttemptResult result;
    std::string text;  ///< begins with the host
  };

  JobNodes(Executor& executor, const JobOptions& job, Poller& poller);

  /// Asks the launchers of the other hosts what their workers do.
  HostLink& link() { return link_; }

  /// This host is ready for an attempt. `store_port`: of the workers' store, if this is host 0.
  void ready(int attempt, std::uint16_t store_port);
  /// Whether all hosts are ready. Throws if a host did not join or its options differ.
  bool may_start();
  /// The port of the workers' store, after may_start(); the launchers meet at another one.
  std::uint16_t store_port() const { return store_port_; }
  /// This host runs the workers of the attempt.
  void running();

  /// Announces that the attempt has failed on this host by itself; the first call of an attempt counts.
  void fail(const AttemptResult& result, const std::string& text);
  /// Announces that this launcher got a signal, which all others then handle as theirs.
  void announce_signal(int signal);
  /// Returns a signal that another launcher got, once; 0 if there is none.
  int take_signal();
  /// Returns why another host ends the attempt, once; empty if it does not.
  std::string take_failure();

  /// No process of the attempt is left on this host.
  void end();
  /// Whether this holds for all hosts, or a launcher is gone.
  bool all_ended();
  /// Why the attempt failed, the same on all hosts; after all_ended(). Nullopt: it has not failed.
  const std::optional<Failure>& failure() const { return failure_; }
  /// Whether a launcher is gone, or could not join: there is no other attempt.
  bool lost() const { return gone_.has_value(); }

 private:
  void publish();
  void read_rounds();
  void note(const NodeStates& states);
  std::string name_of(int node, const std::string& text) const;

  NodeState mine_;
  const int node_;
  HostLink link_;
  std::unique_ptr<NodeRounds> rounds_;
  std::optional<Error> gone_;  ///< why there are no more rounds
  std::uint16_t store_port_ = 0;
  bool all_ready_ = false;
  bool all_ended_ = false;
  int signal_ = 0;  ///< of another launcher
  bool signal_taken_ = false;
  std::string failure_elsewhere_;
  bool failure_taken_ = false;
  std::optional<Failure> failure_;
};

}  // namespace torchspan::launch
