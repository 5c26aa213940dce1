#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/collective/group.h>
#include <torchspan/core/log.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/net/network.h>
#include <torchspan/detail/rendezvous/environment.h>
#include <torchspan/detail/rpc/service.h>

namespace torchspan {

/// Who this worker is and how it behaves. from_env() reads what the launcher said; without a launcher it is a
/// world of one, so the same program runs on a laptop and on a cluster.
struct WorkerOptions {
  rendezvous::WorkerEnvironment environment;
  net::Secret secret;           ///< empty: the job's, from environment.secret_file
  net::NetworkOptions network;  ///< memory shared on one host; certificates and heartbeats between hosts
  Duration rpc_timeout = std::chrono::seconds(60);
  /// How long a worker of this host may be stopped, by a signal or a debugger, before calls to it fail and
  /// steps that need it end; zero: as long as it is stopped. Between hosts a stopped worker is silent, and
  /// network.tls.dead_after is the limit.
  Duration stopped_limit = std::chrono::seconds(5);
  std::size_t threads = 4;                   ///< handlers that run at once
  std::size_t max_threads = 256;             ///< pool threads, those that wait included
  std::size_t max_pending_calls = 1u << 18;  ///< per peer: further ones fail with kOverloaded
  std::uint64_t max_unsent_bytes = std::uint64_t{4}
                                   << 30;  ///< per peer that the wire has not taken: the same
  std::uint64_t max_waiting_bytes = std::uint64_t{4}
                                    << 30;  ///< per caller of requests that wait for a thread
  /// shutdown() throws Error{kInvalid} that lists the values of this worker which others still refer to:
  /// their type, size, place of creation and holders. It is complete nevertheless. False: such references are
  /// given back without a word.
  bool strict_leaks = false;
  /// shutdown() warns in the log of values whose references nobody gave back, or that others still refer to
  /// when this worker leaves an open world.
  bool report_leaks = true;
  /// Where tensors live on other devices than the CPU that travel to a worker, and results of calls to it, by
  /// its name. To workers without one they go as they are, and arrive on the CPU.
  std::map<std::string, DeviceMap> device_maps = {};
  LogLevel log_level = LogLevel::kWarning;
  bool require_same_functions = true;  ///< refuse a world whose workers have different function tables

  /// RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the other conventions (rendezvous/environment.h);
  /// certificates from TORCHSPAN_CERTIFICATE_FILE, TORCHSPAN_KEY_FILE and TORCHSPAN_AUTHORITY_FILE; the way
  /// between hosts from TORCHSPAN_NETWORK (tls, ucx or ucx-isolated);
  /// TORCHSPAN_LOG_LEVEL; TORCHSPAN_RPC_TIMEOUT and TORCHSPAN_STOPPED_LIMIT in seconds, 0 for none, the
  /// latter also for network.tls.dead_after where it is longer. Throws Error{kInvalid} naming the variable
  /// that is wrong.
  static WorkerOptions from_env();
};

/// One worker of a world, from joining to leaving: the executor, the connections, the Worker and the
/// extensions for distributed autograd and optimizers. Usually one per process; several in one process work
/// too.
class Session {
 public:
  /// Joins the world: returns when all its workers are there, or throws on each of them (see
  /// rendezvous/membership.h: missing or doubled workers are named).
  explicit Session(WorkerOptions options, FunctionTable functions = {},
                   std::vector<std::unique_ptr<rpc::Extension>> extensions = {});
  /// Stops at once if shutdown() was not called: the other workers hear that this one died. Workers, RRefs,
  /// contexts and optimizers may outlive it: they answer Error{kCancelled} then.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Worker& worker();
  Runtime& runtime();
  std::uint32_t rank() { return worker().rank(); }
  std::uint32_t world_size() { return worker().world_size(); }

  /// Collective over options.ranks (all workers, unless it says otherwise): a group for all-reduce and its
  /// kin (collective/group.h). It may outlive the session; its operations fail with kCancelled then.
  collective::Group group(collective::GroupOptions options = {});

  /// Waits until every worker called it and no call or reference is outstanding anywhere, serving the others
  /// meanwhile; then leaves. Waits for ever unless there is a `timeout`. Throws Error naming the worker that
  /// died, or what was waited for at the time-out; this worker has left then too. In an open world: waits for
  /// this worker's own calls and references only.
  void shutdown();
  void shutdown(Duration timeout);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan
