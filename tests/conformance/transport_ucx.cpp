#include <map>

#include "net/api/ucx.h"
#include "net/tls/tls_address.h"
#include "tests/conformance/transport_echo.h"
#include "tests/conformance/transport_sockets.h"

/// The UCX transport's rows in the suite: over UCX's TCP on the loopback interface, as a stand-in for RDMA;
/// peers as threads and as processes.
namespace torchspan::net::conformance::transport_ucx {
namespace {

class UcxWorld final : public World {
 public:
  explicit UcxWorld(Peers peers) : peers_(peers) {}

  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string&, Handler& handler,
                                            TransportOptions options) override {
    return make_ucx_transport(*executor_, handler, std::move(options),
                              {.network = UcxNetwork::kIsolated, .devices = "lo", .tls = tls_});
  }
  std::string listen_address(const std::string& name) override {
    const auto known = echoes_.find(name);
    return known == echoes_.end() ? "ucx:127.0.0.1:0" : known->second;
  }
  std::string unused_address() override { return reserve_port(reserved_, "ucx"); }
  bool silence_is_death() const override { return true; }
  bool set_dead_after(Duration time) override {
    tls_.dead_after = time;
    return true;
  }
  /// UCX takes a while to end the endpoints of a transport in a thread.
  bool dies_at_once() const override { return peers_ == Peers::kProcesses; }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override {
    return std::make_unique<UnauthenticatedSocketPeer>(
        [](const std::string& text) { return *numeric_address(parse_tls_address(text, "ucx")); });
  }
  std::string greeting_start() override { return {"\x16\x03\x01\x02\x00\x01", 6}; }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    std::unique_ptr<EchoPeer> echo;
    if (peers_ == Peers::kProcesses) {
      echo = std::make_unique<ProcessEcho>(std::vector<std::string>{"ucx", listen_address(name)});
    } else {
      echo = std::make_unique<LocalEcho>(*this, name);
    }
    echoes_[name] = echo->address();
    return echo;
  }

 private:
  const Peers peers_;
  TlsOptions tls_{.dead_after = kLongSilence};
  const std::unique_ptr<Executor> executor_ = make_executor();
  Descriptor reserved_;
  std::map<std::string, std::string> echoes_;
};

Backend ucx(const std::string& name, Peers peers) {
  return {name, [=](const std::function<void(World&)>& body) {
            UcxWorld world(peers);
            body(world);
          }};
}

const Backend kUcx = ucx("Ucx", Peers::kThreads);
const Backend kUcxProcesses = ucx("UcxProcesses", Peers::kProcesses);

INSTANTIATE_TEST_SUITE_P(Ucx, TransportConformance, ::testing::Values(kUcx), backend_name);
INSTANTIATE_TEST_SUITE_P(Ucx, TransportPeerConformance, ::testing::Values(kUcx, kUcxProcesses), backend_name);

}  // namespace
}  // namespace torchspan::net::conformance::transport_ucx
