#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/rpc/options.h>
#include <torchspan/rpc/worker.h>

namespace torchspan::device {
class DeviceRuntime;
}

namespace torchspan::rpc {

struct ServiceOptions {
  std::string name = "worker0";
  std::uint32_t rank = 0;
  std::string listen;  ///< where the transport listens: "unix:/…", "sim:worker0"
  Duration default_timeout = std::chrono::seconds(60);  ///< of calls without a timeout; zero: none
  Duration connect_timeout =
      Duration::zero();           ///< of calls to a member that cannot be reached; zero: their deadlines
  std::size_t threads = 4;        ///< concurrent handlers
  std::size_t max_threads = 256;  ///< pool threads, including blocked ones
  std::size_t max_pending_calls = 1u << 18;                  ///< calls per peer that wait for replies
  std::uint64_t max_waiting_bytes = std::uint64_t{4} << 30;  ///< per peer, of requests queued for a thread
  Duration stopped_limit =
      std::chrono::seconds(5);  ///< calls to a stopped process fail after it; zero: never
  /// How long a graceful shutdown waits while no message is handled anywhere, once all workers have begun it;
  /// zero: no limit.
  Duration shutdown_limit = Duration::zero();
  /// Device map per peer name: where non-CPU tensors sent to the peer, and results of calls to it, are
  /// placed. Without a map tensors are sent as they are and arrive on the CPU.
  std::map<std::string, DeviceMap> device_maps = {};
  /// Device memory for each peer on this host and pair of devices that a map or a pipeline names, through which tensors
  /// go from device to device; allocated when it is first needed. 0: they go through host memory.
  std::size_t device_staging_bytes = std::size_t{64} << 20;
  std::shared_ptr<const device::DeviceRuntime> device_runtime = nullptr;  ///< null: CUDA's
  bool report_leaks = true;  ///< graceful shutdown warns of values that others still reference
  /// Makes a graceful shutdown throw Error{kInvalid} that lists the values here which other workers still
  /// reference when all begin to shut down (open world: when this worker leaves). The shutdown completes
  /// first.
  bool strict_leaks = false;
};

/// Runs one worker: its transport, threads and tables. Construct it, join a world with address(), start(),
/// use worker(), shutdown(). Do not destroy it on one of its own threads.
class WorkerService {
 public:
  using MakeTransport = std::function<std::unique_ptr<net::Transport>(net::Handler&)>;

  /// Listens and attaches the extensions; does not serve yet. The worker and every handle to it (Worker,
  /// RemoteModule, an optimizer) share ownership of `runtime`. Handles may outlive the service; their calls
  /// then fail with Error{kCancelled}.
  WorkerService(std::shared_ptr<Runtime> runtime, FunctionTable functions, ServiceOptions options,
                MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions);
  /// For a runtime that outlives the service and all handles to its worker.
  WorkerService(Runtime& runtime, FunctionTable functions, ServiceOptions options,
                MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions);
  /// Calls stop(). On one of the worker's own threads it stops as much as possible and leaks the rest,
  /// because the thread cannot join itself.
  ~WorkerService();

  /// Address that peers dial; empty with world size 1.
  const std::string& address() const;
  /// Starts to serve the members. Calls that peers sent earlier wait until now.
  void start(std::unique_ptr<rendezvous::Membership> membership);
  /// The membership, after start().
  rendezvous::Membership& membership();
  Worker& worker();

  /// Waits until no worker has outstanding calls and all references are released, then leaves together with
  /// the others. If a worker dies or the deadline passes first, stops this worker and throws an Error that
  /// names the cause. Idempotent.
  void shutdown(Deadline deadline = Deadline::never());
  /// Stops this worker at once: outstanding calls fail with kCancelled, and other workers see it die with
  /// reason `why`. Idempotent.
  void stop(const std::string& why = "left without shutdown(); see its own output for why");

 private:
  class Impl;
  ProcessOwned<Impl> impl_;
};

}  // namespace torchspan::rpc
