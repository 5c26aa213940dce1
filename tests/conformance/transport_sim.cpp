#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>

#include "core/api/sim_executor.h"
#include "net/api/sim.h"
#include "net/sim/sim_network.h"
#include "net/sim/sim_transport.h"
#include "tests/conformance/transport_echo.h"

/// The simulated network's row in the suite.
namespace torchspan::net::conformance::transport_sim {
namespace {

constexpr Duration kLongestWay = std::chrono::milliseconds(5);

/// A peer without a transport that dials a simulated worker and sends arbitrary bytes.
class SimUnauthenticatedPeer {
 public:
  SimUnauthenticatedPeer(const SimNetwork& network, const std::string& name);
  ~SimUnauthenticatedPeer();

  /// Dials `address` with `bytes` instead of a greeting.
  void dial(const std::string& address, BytesView bytes);
  /// Sends more bytes where a handshake is expected.
  void send(BytesView bytes);
  /// Whether the worker ended the connection.
  bool hung_up() const;

 private:
  const std::shared_ptr<SimNetwork::Impl> network_;
  const std::shared_ptr<SimNode> node_;
  std::shared_ptr<SimChannel> channel_;
};

SimUnauthenticatedPeer::SimUnauthenticatedPeer(const SimNetwork& network, const std::string& name)
    : network_(SimNetwork::Impl::of(network)), node_(std::make_shared<SimNode>(name, nullptr)) {}

SimUnauthenticatedPeer::~SimUnauthenticatedPeer() {
  if (channel_) channel_->end(Error(ErrorKind::kDisconnected, "the unauthenticated peer left"));
  std::deque<Arrival> inbox;
  MutexLock lock(network_->mutex);
  inbox.swap(node_->inbox);
  node_->alive = false;
}

void SimUnauthenticatedPeer::dial(const std::string& address, BytesView bytes) {
  const std::string target = address.substr(address.find(':') + 1);
  MutexLock lock(network_->mutex);
  channel_ =
      std::make_shared<SimChannel>(SimChannel::Start{.network = network_,
                                                     .node = node_,
                                                     .outward = network_->make_wire(node_->name, target),
                                                     .inward = network_->make_wire(target, node_->name),
                                                     .id = network_->next_id(),
                                                     .deadline = Deadline::never(),
                                                     .dialed = true},
                                   TransportOptions{});
  channel_->outward()->source = channel_;
  channel_->inward()->target = channel_;
  network_->transmit(
      channel_->outward(),
      {.kind = Packet::Kind::kDial, .header = Bytes(bytes.begin(), bytes.end()), .segments = {}});
}

void SimUnauthenticatedPeer::send(BytesView bytes) {
  MutexLock lock(network_->mutex);
  network_->transmit(
      channel_->outward(),
      {.kind = Packet::Kind::kHandshake, .header = Bytes(bytes.begin(), bytes.end()), .segments = {}});
}

bool SimUnauthenticatedPeer::hung_up() const {
  MutexLock lock(network_->mutex);
  return std::ranges::any_of(node_->inbox, [](const Arrival& arrival) {
    return arrival.packet.kind == Packet::Kind::kEnd || arrival.packet.kind == Packet::Kind::kNoListener;
  });
}

class UnauthenticatedSimPeer final : public UnauthenticatedPeer {
 public:
  UnauthenticatedSimPeer(SimExecutor& executor, const SimNetwork& network, const std::string& name)
      : executor_(executor), peer_(network, name) {}

  void dial(const std::string& address, BytesView bytes) override {
    peer_.dial(address, bytes);
    executor_.sleep(kLongestWay);
  }
  void send(BytesView bytes) override { peer_.send(bytes); }
  bool sees_hang_up() override {
    const Deadline deadline = executor_.deadline_in(std::chrono::seconds(30));
    while (!peer_.hung_up() && !deadline.passed(executor_.now())) {
      executor_.sleep(std::chrono::microseconds(100));
    }
    return peer_.hung_up();
  }

 private:
  SimExecutor& executor_;
  SimUnauthenticatedPeer peer_;
};

class SimWorld final : public World {
 public:
  SimWorld(SimExecutor& executor, SimNetwork::Options options)
      : executor_(executor), network_(executor, options) {}

  Executor& executor() override { return executor_; }
  std::unique_ptr<Transport> make_transport(const std::string& name, Handler& handler,
                                            TransportOptions options) override {
    return network_.make_transport(name, handler, std::move(options));
  }
  std::string listen_address(const std::string& name) override { return "sim:" + name; }
  std::string unused_address() override { return "sim:unused"; }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override {
    return std::make_unique<UnauthenticatedSimPeer>(
        executor_, network_, "unauthenticated" + std::to_string(unauthenticated_count_++));
  }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    return std::make_unique<LocalEcho>(*this, name, [this, name] { network_.kill(name); });
  }

 private:
  SimExecutor& executor_;
  SimNetwork network_;
  int unauthenticated_count_ = 0;
};

/// A new seed for every run, or TORCHSPAN_SIM_SEED, to reproduce a failure.
std::uint64_t choose_seed() {
  const char* chosen = std::getenv("TORCHSPAN_SIM_SEED");
  return chosen != nullptr ? std::strtoull(chosen, nullptr, 10) : std::random_device()();
}

Backend sim(const std::string& name, SimNetwork::Options options) {
  return {name, [options](const std::function<void(World&)>& body) {
            const std::uint64_t seed = choose_seed();
            SimExecutor executor(seed);
            const int failed_before =
                ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
            executor.run([&] {
              SimWorld world(executor, options);
              body(world);
            });
            if (::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() !=
                failed_before) {
              ADD_FAILURE() << "run again with TORCHSPAN_SIM_SEED=" << seed;
            }
          }};
}

const Backend kSim = sim("Sim", {});
const Backend kSimWithJitter = sim("SimWithJitter", {.jitter = kLongestWay - std::chrono::milliseconds(1)});

INSTANTIATE_TEST_SUITE_P(Sim, TransportConformance, ::testing::Values(kSim, kSimWithJitter), backend_name);
INSTANTIATE_TEST_SUITE_P(Sim, TransportPeerConformance, ::testing::Values(kSim, kSimWithJitter),
                         backend_name);

}  // namespace
}  // namespace torchspan::net::conformance::transport_sim
