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
#include <torchspan/rpc/device_map.h>
#include <torchspan/rpc/worker.h>

namespace torchspan::rpc {

struct ServiceOptions {
  std::string name = "worker0";
  std::uint32_t rank = 0;
  std::string listen;  ///< where the transport listens: "unix:/…", "sim:worker0"
  Duration default_timeout = std::chrono::seconds(60);  ///< of calls without one of their own; zero: none
  std::size_t threads = 4;                              ///< handlers that run at once
  std::size_t max_threads = 256;                        ///< pool threads, those that wait included
  std::size_t max_pending_calls = 1u << 18;             ///< per peer that wait for replies
  std::uint64_t max_waiting_bytes = std::uint64_t{4} << 30;  ///< per peer of requests that wait for a thread
  Duration stopped_limit =
      std::chrono::seconds(5);  ///< calls to a stopped process fail after it; zero: never
  /// Where tensors live on other devices than the CPU that travel to a peer, and results of calls to it, by
  /// the peer's name. To peers without one they go as they are, and arrive on the CPU.
  std::map<std::string, DeviceMap> device_maps = {};
  bool report_leaks = true;  ///< graceful shutdown warns of values that others still refer to at its end
  /// Graceful shutdown throws Error{kInvalid} that lists the values here that other programs still refer to
  /// as all begin to shut down, in an open world as this worker leaves; it is complete nevertheless.
  bool strict_leaks = false;
};

/// Runs one worker: its transport, its threads and its tables. Construct, join a world with address(),
/// start(), use worker(), shutdown(). To be destroyed by none of its own threads.
class WorkerService {
 public:
  using MakeTransport = std::function<std::unique_ptr<net::Transport>(net::Handler&)>;

  /// Listens and attaches the extensions; serves nothing yet. The worker has a part in `runtime`, and so has
  /// every handle to it (Worker, RemoteModule, an optimizer): they may outlive the service, and answer
  /// Error{kCancelled} then.
  WorkerService(std::shared_ptr<Runtime> runtime, FunctionTable functions, ServiceOptions options,
                MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions);
  /// The same for a runtime that outlives the service and all handles to its worker.
  WorkerService(Runtime& runtime, FunctionTable functions, ServiceOptions options,
                MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions);
  /// stop(). A thread of the worker's own cannot wait for itself: there the worker is stopped as far as can
  /// be, and what is left of it stays in memory.
  ~WorkerService();

  /// What peers dial; empty in a world of one.
  const std::string& address() const;
  /// Begins to serve: the members are the world. Calls that peers sent earlier wait until now.
  void start(std::unique_ptr<rendezvous::Membership> membership);
  /// The world, once start() was called.
  rendezvous::Membership& membership();
  Worker& worker();

  /// Waits until no worker has calls outstanding and all references are given back, then leaves together with
  /// the others. When a worker died or the deadline ends first: stops this worker and throws an Error that
  /// says which. Idempotent.
  void shutdown(Deadline deadline = Deadline::never());
  /// Stops this worker at once; what is outstanding fails with kCancelled, and the other workers see a death
  /// with the reason `why`. Idempotent.
  void stop(const std::string& why = "left without shutdown(); see its own output for why");

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::rpc
