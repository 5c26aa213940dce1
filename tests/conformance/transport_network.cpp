#include <filesystem>
#include <map>

#include "net/api/network.h"
#include "net/network/network_transport.h"
#include "net/tls/tls_address.h"
#include "tests/conformance/transport_echo.h"
#include "tests/conformance/transport_sockets.h"
#include "tests/support/processes.h"

/// The rows of the transport for several hosts: peers that find each other on one host, and peers that
/// believe to be on different hosts.
namespace torchspan::net::conformance::transport_network {
namespace {

enum class Hosts { kOne, kSeveral };

bool is_file(const std::string& near) { return std::filesystem::exists(near.substr(near.find(':') + 1)); }

class NetworkWorld final : public World {
 public:
  NetworkWorld(Hosts hosts, Peers peers) : hosts_(hosts), peers_(peers) {}

  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string& name, Handler& handler,
                                            TransportOptions options) override {
    return make_marked_network_transport(*executor_, handler, std::move(options),
                                         {.network = network_, .host_mark = mark_of(name)});
  }
  std::string listen_address(const std::string& name) override {
    const auto known = echoes_.find(name);
    return known == echoes_.end() ? "unix:" + folder_.path() + "/" + name + ",tls:127.0.0.1:0"
                                  : known->second;
  }
  std::string unused_address() override {
    return "unix:" + folder_.path() + "/unused@" + mark_of("unused") + "," + reserve_port(reserved_, "tls");
  }
  std::string named(const std::string& address) override {
    const NetworkPlace place = parse_network_place(address);
    return hosts_ == Hosts::kOne && is_file(place.near) ? place.near : place.far;
  }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override {
    return std::make_unique<UnauthenticatedSocketPeer>([this](const std::string& text) {
      const NetworkPlace place = parse_network_place(text);
      return hosts_ == Hosts::kOne ? parse_address(place.near)
                                   : *numeric_address(parse_tls_address(place.far));
    });
  }
  bool silence_is_death() const override { return hosts_ == Hosts::kSeveral; }
  bool set_dead_after(Duration time) override {
    network_.tls.dead_after = time;
    return true;
  }
  std::string greeting_start() override {
    return hosts_ == Hosts::kOne ? World::greeting_start() : std::string("\x16\x03\x01\x02\x00\x01", 6);
  }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    std::unique_ptr<EchoPeer> echo;
    if (peers_ == Peers::kProcesses) {
      echo = std::make_unique<ProcessEcho>(
          std::vector<std::string>{"network", listen_address(name), mark_of(name)});
    } else {
      echo = std::make_unique<LocalEcho>(*this, name);
    }
    echoes_[name] = echo->address();
    return echo;
  }

 private:
  std::string mark_of(const std::string& name) const {
    return hosts_ == Hosts::kOne ? "here" : "host-of-" + name;
  }

  const Hosts hosts_;
  const Peers peers_;
  NetworkOptions network_{.tls = {.dead_after = kLongSilence}};
  const std::unique_ptr<Executor> executor_ = make_executor();
  const torchspan::testing::TemporaryFolder folder_;
  Descriptor reserved_;
  std::map<std::string, std::string> echoes_;
};

Backend network(const std::string& name, Hosts hosts, Peers peers) {
  return {name, [=](const std::function<void(World&)>& body) {
            NetworkWorld world(hosts, peers);
            body(world);
          }};
}

const Backend kOneHost = network("OneHost", Hosts::kOne, Peers::kThreads);
const Backend kSeveralHosts = network("SeveralHosts", Hosts::kSeveral, Peers::kThreads);
const Backend kOneHostProcesses = network("OneHostProcesses", Hosts::kOne, Peers::kProcesses);
const Backend kSeveralHostsProcesses = network("SeveralHostsProcesses", Hosts::kSeveral, Peers::kProcesses);

INSTANTIATE_TEST_SUITE_P(Network, TransportConformance, ::testing::Values(kOneHost, kSeveralHosts),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(Network, TransportPeerConformance,
                         ::testing::Values(kOneHost, kSeveralHosts, kOneHostProcesses,
                                           kSeveralHostsProcesses),
                         backend_name);

}  // namespace
}  // namespace torchspan::net::conformance::transport_network
