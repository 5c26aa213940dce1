#pragma once
// Session: one worker and everything it runs on. Includes no torch/nn.
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/collective.h>
#include <torchspan/core/log.h>
#include <torchspan/core/observation.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/checkpoint/extension.h>
#include <torchspan/detail/net/secret.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/detail/quorum/extension.h>
#include <torchspan/detail/rpc/service.h>
#include <torchspan/net.h>
#include <torchspan/rendezvous.h>

namespace torchspan {

/// Identity, network, limits and timeouts of one worker. from_env() fills it from the launcher's
/// environment variables. Without a launcher the world size is 1, so the same program runs on a laptop and
/// on a cluster.
struct WorkerOptions {
  /// Name, rank, world size, addresses and files of this worker, and join_timeout, how long it waits for the
  /// others to join (rendezvous.h).
  rendezvous::WorkerEnvironment environment;
  net::Secret secret;           ///< empty: read from environment.secret_file
  net::NetworkOptions network;  ///< shared memory on one host; certificates, heartbeats between hosts (net.h)
  Duration rpc_timeout = std::chrono::seconds(60);  ///< of calls without a timeout; zero: no limit
  /// How long a call waits for the first connection to a worker that is a member, but too busy to accept one; zero: until
  /// its timeout.
  Duration connect_timeout = Duration::zero();
  /// How long shutdown() waits for calls and references that do not end: counted while no worker sends or
  /// handles a message, once all have called it; zero: no limit. Workers that have not called it, and a
  /// worker that serves calls, are waited for without a limit.
  Duration shutdown_timeout = std::chrono::minutes(30);
  Duration leave_timeout = std::chrono::seconds(30);  ///< limit of the wait in ~Session; 0: none
  /// How long a worker on this host may stay stopped by a signal or a debugger before calls to it fail and
  /// training steps that need it end; 0: no limit. A stopped worker on another host is silent, and
  /// network.tls.dead_after applies instead.
  Duration stopped_limit = std::chrono::seconds(5);
  std::size_t threads = 4;                   ///< concurrent handlers
  std::size_t max_threads = 256;             ///< pool threads, including blocked ones
  std::size_t max_pending_calls = 1u << 18;  ///< per peer; beyond it calls fail with kOverloaded
  std::uint64_t max_unsent_bytes = std::uint64_t{4} << 30;   ///< per peer, queued for sending; same error
  std::uint64_t max_waiting_bytes = std::uint64_t{4} << 30;  ///< per caller, of requests queued for a thread
  /// Makes shutdown() throw Error{kInvalid} that lists the values of this worker to which other workers
  /// still hold references, with type, size, creation site and holders. The shutdown completes first.
  /// False: report_leaks decides whether the log names them.
  bool strict_leaks = false;
  /// Makes shutdown() log a warning for values whose references were never released, or which other workers
  /// still reference when this worker leaves an open world.
  bool report_leaks = true;
  /// Device map per peer name: where non-CPU tensors sent to the peer, and results of calls to it, are
  /// placed. Without a map tensors are sent as they are and arrive on the CPU.
  std::map<std::string, DeviceMap> device_maps = {};
  /// Device memory for each peer on this host and pair of devices that a device map or a pipeline names, through which
  /// tensors go from device to device, larger ones in parts; allocated when it is first needed. 0: they go through host
  /// memory.
  std::size_t device_staging_bytes = std::size_t{64} << 20;
  LogLevel log_level = LogLevel::kWarning;
  bool require_same_functions = true;   ///< reject workers with different function tables
  ObservationOptions observation = {};  ///< trace, metrics, curves (docs/observability.md)

  /// Reads `environment` with rendezvous::read_environment() (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
  /// TORCHSPAN_JOIN_TIMEOUT, certificates and others; rendezvous.h); the transport between hosts from
  /// TORCHSPAN_NETWORK (tls, tcp-isolated, ucx, ucx-isolated); TORCHSPAN_PORT_RANGE; TORCHSPAN_LOG_LEVEL;
  /// `observation` as ObservationOptions::from() says; TORCHSPAN_RPC_TIMEOUT and TORCHSPAN_STOPPED_LIMIT in
  /// seconds, 0 for none. The latter also raises network.tls.dead_after. Throws Error{kInvalid} that names the
  /// wrong variable.
  static WorkerOptions from_env();
};

struct SessionDisguise;

/// Through which a worker serves parts of this library to the others.
using Extensions = std::vector<std::unique_ptr<rpc::Extension>>;

namespace detail {

/// Adds an extension of type E unless there is one.
template <class E>
void add_default(Extensions& extensions) {
  for (const auto& extension : extensions) {
    if (dynamic_cast<E*>(extension.get()) != nullptr) return;
  }
  extensions.insert(extensions.begin(), std::make_unique<E>());
}

/// Adds those of all rooms. Inline, so that only programs that call it link these rooms.
inline Extensions with_defaults(Extensions extensions) {
  add_default<optim::OptimExtension>(extensions);
  add_default<autograd::AutogradExtension>(extensions);
  add_default<pipeline::PipelineExtension>(extensions);
  add_default<checkpoint::CheckpointExtension>(extensions);
  add_default<quorum::QuorumExtension>(extensions);
  return extensions;
}

}  // namespace detail

/// One worker, from joining the world to leaving it. Owns the executor, the connections, the Worker and the
/// extensions for distributed autograd, optimizers and pipelines. Usually one per process; one process may
/// hold several.
class Session {
 public:
  /// Joins the world. Returns when all workers have joined; on failure, or after environment.join_timeout,
  /// it throws on each of them and names missing or duplicate workers. `extensions` are added to those for
  /// distributed autograd, optimizers and pipelines, or replace the one of their type.
  explicit Session(const WorkerOptions& options, FunctionTable functions = {}, Extensions extensions = {})
      : Session(options, std::move(functions), detail::with_defaults(std::move(extensions)), OnlyThese()) {}
  /// The same with the extensions E and that for distributed autograd only, so that a program links no more rooms than
  /// it uses: Session::with<optim::OptimExtension>(options). On every worker of the job.
  template <class... E>
  static Session with(const WorkerOptions& options, FunctionTable functions = {}) {
    Extensions extensions;
    (extensions.push_back(std::make_unique<E>()), ...);
    detail::add_default<autograd::AutogradExtension>(extensions);
    return Session(options, std::move(functions), std::move(extensions), OnlyThese());
  }
  /// Leaves as shutdown() does, within options.leave_timeout, unless shutdown() was called before. Leaves
  /// at once when an exception unwinds its scope or on a thread that serves a call. Failures are logged.
  /// Workers, RRefs, contexts, groups and optimizers may outlive the session; their operations then fail
  /// with kCancelled.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Worker& worker();
  operator const Worker&() { return worker(); }  // what takes a worker takes a session
  Runtime& runtime();
  int rank() { return worker().rank(); }
  int world_size() { return worker().world_size(); }

  /// Creates a group for collective operations (collective.h). Collective over options.ranks; by
  /// default all workers. The group may outlive the session; its operations then fail with kCancelled.
  collective::Group group(collective::GroupOptions options = {}) {
    return collective::Group::make(runtime_owner(), membership(), std::move(options));
  }

  /// Runs `body(session)`, then shutdown(). If `body` throws, this worker leaves at once, the other workers
  /// see it die with the exception's type and text, and the exception is rethrown.
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

  /// Waits until every worker has called shutdown() and no call or reference is outstanding on any worker,
  /// and serves the other workers meanwhile; then leaves. In an open world it waits for this worker's own
  /// calls and references only. Throws Error that names the worker that died, or after
  /// options.shutdown_timeout what it waited for; this worker has left in either case.
  void shutdown();
  /// The same, but waits for at most `timeout` in all.
  void shutdown(Duration timeout);
  /// Leaves at once. The other workers see this worker die with the type and text of `cause`.
  void abort(const std::exception_ptr& cause);

 private:
  class Impl;
  struct OnlyThese {};
  friend Session make_session(const SessionDisguise& disguise, WorkerOptions options, FunctionTable functions,
                              Extensions extensions);
  Session(const WorkerOptions& options, FunctionTable functions, Extensions extensions, OnlyThese only);
  explicit Session(std::unique_ptr<Impl> impl);
  const std::shared_ptr<Runtime>& runtime_owner() const;
  rendezvous::Membership& membership();

  ProcessOwned<Impl> impl_;
};

}  // namespace torchspan
