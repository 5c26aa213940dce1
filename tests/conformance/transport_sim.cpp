#include <cstdlib>
#include <random>

#include "core/api/sim_executor.h"
#include "net/api/sim.h"
#include "net/sim/sim_unauthenticated_peer.h"
#include "tests/conformance/transport_echo.h"

/// The simulated network's row in the suite.
namespace torchspan::net::conformance::transport_sim {
namespace {

constexpr Duration kLongestWay = std::chrono::milliseconds(5);

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
