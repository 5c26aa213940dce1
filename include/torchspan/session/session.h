#pragma once
#include <cstdint>
#include <exception>
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
  Duration shutdown_timeout = std::chrono::minutes(30);  ///< of shutdown(); zero: none
  Duration leave_timeout = std::chrono::seconds(30);     ///< how long ~Session waits for the other workers
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
  /// Without a shutdown() before, leaves as shutdown() does, within options.leave_timeout; at once when an
  /// exception ends its scope, or on a thread that serves a call. Failures go to the log. Workers, RRefs,
  /// contexts, groups and optimizers may outlive the session: their operations fail with kCancelled.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Worker& worker();
  Runtime& runtime();
  int rank() { return worker().rank(); }
  int world_size() { return worker().world_size(); }

  /// Collective over options.ranks (all workers, unless it says otherwise): a group for all-reduce and its
  /// kin (collective/group.h). It may outlive the session; its operations fail with kCancelled then.
  collective::Group group(collective::GroupOptions options = {});

  /// Runs `body(session)`, then shutdown(). When `body` throws: this worker leaves at once, the other workers
  /// see its death with the exception's type and text, and the exception is thrown on.
  template <class F>
  void run(F&& body) {
    try {
      body(*this);
    } catch (...) {
      abort(std::current_exception());
      throw;
    }
    shutdown();
  }

  /// Waits until every worker has called it and no call or reference is outstanding anywhere, and serves the
  /// others meanwhile; then leaves. Throws Error naming the worker that died, or after options.shutdown_timeout
  /// what it waited for; this worker has left then too. In an open world it waits for this worker's own calls
  /// and references only.
  void shutdown();
  void shutdown(Duration timeout);
  /// Leaves at once. The other workers see its death with the type and text of `cause`.
  void abort(const std::exception_ptr& cause);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan
