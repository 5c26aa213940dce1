#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/rpc/service.h>
#include <torchspan/detail/wire/frame.h>

#include "core/api/sim_executor.h"
#include "net/api/sim.h"
#include "net/api/stream.h"

namespace torchspan::testing {

/// The type of a request between workers; nullopt for replies and for messages of the membership.
inline std::optional<wire::MessageType> request_type(const net::SimMessage& message) {
  if (!message.from.starts_with("sim:worker") || message.from.ends_with(".membership")) return std::nullopt;
  const wire::FrameView frame = wire::decode_frame(message.header);
  if ((frame.header.flags & wire::kFlagReply) != 0) return std::nullopt;
  return frame.header.type;
}

/// The parts from which one worker of a simulated cluster is made.
struct WorkerPlan {
  FunctionTable functions;
  rpc::ServiceOptions service;
  rendezvous::MembershipOptions join;
  net::DeviceMemoryKind device_memory = net::DeviceMemoryKind::kNone;  ///< that its connections carry
};

struct ClusterOptions {
  int workers = 2;
  std::uint64_t seed = 1;
  FunctionTable functions = {};
  std::function<std::vector<std::unique_ptr<rpc::Extension>>()> extensions = {};
  Duration default_timeout = std::chrono::seconds(60);
  std::size_t threads = 4;
  net::SimNetwork::Options network = {};
  std::uint64_t max_unsent = net::TransportOptions().max_unsent;
  rpc::ServiceOptions service =
      {};             ///< limits; name, rank, threads and timeout are set from the members above
  bool open = false;  ///< the world is open: workers may start() later
  rendezvous::MembershipOptions join = {};  ///< heartbeats; the cluster sets name, rank, size and addresses
  bool graceful = true;                     ///< whether run() ends every worker by shutdown()
  Duration shutdown_limit = std::chrono::minutes(10);  ///< of that shutdown
  std::function<void(int rank, WorkerPlan& plan)> adjust =
      {};           ///< changes a worker's plan before the worker is made
  Duration spin{};  ///< how long waiting threads poll before they sleep; callers then drive the transport
  /// Wraps a worker's transport in one of the test's.
  std::function<std::unique_ptr<net::Transport>(int rank, std::unique_ptr<net::Transport>)> wrap = {};
};

/// A world of workers in this process on the simulated network and clock. run() starts them, runs `body` on
/// each at the same time, in a simulated thread per worker, shuts them down and rethrows the first failure.
class SimCluster {
 public:
  explicit SimCluster(ClusterOptions options)
      : options_(std::move(options)), executor_(options_.seed), network_(executor_, options_.network) {
    executor_.set_spin_limit(options_.spin);
  }

  SimExecutor& executor() { return executor_; }
  net::SimNetwork& network() { return network_; }
  static std::string name(int rank) { return "worker" + std::to_string(rank); }

  /// Kills the worker at once: both its transports go silent and its peers see their connections end.
  void kill(int rank) {
    network_.kill(name(rank));
    network_.kill(name(rank) + ".membership");
    if (rank == 0) network_.kill("store");
  }

  /// Starts another worker inside a running simulation: a new one, or the next incarnation of one that is
  /// gone. A failure of `body` ends the process.
  Thread start(int rank, int incarnation, std::function<void(rpc::WorkerService&)> body) {
    return executor_.spawn(
        name(rank), [this, rank, incarnation, body = std::move(body)] { live(rank, incarnation, body); });
  }

  void run(std::function<void(Worker&)> body) {
    for (auto& failure : try_services([&](rpc::WorkerService& service) {
           body(service.worker());
           if (options_.graceful) service.shutdown(executor_.deadline_in(options_.shutdown_limit));
         })) {
      if (failure) std::rethrow_exception(failure);
    }
  }

  /// Runs `body` with each worker's service, which it may shut down; returns what each rank threw, or null.
  std::vector<std::exception_ptr> try_services(std::function<void(rpc::WorkerService&)> body) {
    std::vector<std::exception_ptr> failures(options_.workers);
    executor_.run([&] {
      std::vector<Thread> threads;
      for (int rank = 0; rank < options_.workers; ++rank) {
        threads.push_back(executor_.spawn(name(rank), [&, rank] {
          try {
            live(rank, 0, body);
          } catch (...) {
            failures[rank] = std::current_exception();
          }
        }));
      }
    });
    return failures;
  }

 private:
  WorkerPlan plan(int rank, int incarnation) const {
    WorkerPlan plan;
    plan.functions = options_.functions;
    plan.service = options_.service;
    plan.join = options_.join;
    plan.service.name = name(rank);
    plan.service.rank = static_cast<std::uint32_t>(rank);
    plan.service.listen = "sim:" + name(rank);
    plan.service.default_timeout = options_.default_timeout;
    plan.service.threads = options_.threads;
    plan.service.stopped_limit = Duration::zero();  // all workers are in this process
    plan.join.name = name(rank);
    plan.join.rank = rank;
    plan.join.world_size = options_.open ? rendezvous::kOpenWorld : options_.workers;
    plan.join.store_address = "sim:store";
    plan.join.instance =
        static_cast<std::uint64_t>(rank) + 1 + 1000 * static_cast<std::uint64_t>(incarnation);
    if (options_.adjust) options_.adjust(rank, plan);
    return plan;
  }

  void live(int rank, int incarnation, const std::function<void(rpc::WorkerService&)>& body) {
    const auto owned = std::make_shared<Runtime>(executor_, name(rank));  // handles may outlive the service
    Runtime& runtime = *owned;
    WorkerPlan plan = this->plan(rank, incarnation);
    rpc::WorkerService service(
        owned, std::move(plan.functions), plan.service,
        [&](net::Handler& handler) {
          net::TransportOptions transport;
          transport.max_unsent = options_.max_unsent;
          transport.device_memory = plan.device_memory;
          auto made = network_.make_transport(name(rank), handler, std::move(transport));
          return options_.wrap ? options_.wrap(rank, std::move(made)) : std::move(made);
        },
        options_.extensions ? options_.extensions() : std::vector<std::unique_ptr<rpc::Extension>>());
    plan.join.address = service.address();
    // The store and the client of a worker that uses another's name still have separate endpoints.
    service.start(rendezvous::Membership::join(
        runtime,
        [&](const std::string& endpoint, net::Handler& handler) {
          return network_.make_transport(endpoint == "store" ? endpoint : name(rank) + ".membership", handler,
                                         {});
        },
        plan.join));
    body(service);
  }

  ClusterOptions options_;
  SimExecutor executor_;
  net::SimNetwork network_;
};

}  // namespace torchspan::testing
