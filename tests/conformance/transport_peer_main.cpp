#include <cstdio>
#include <unistd.h>

#include "net/api/local.h"
#include "net/api/network.h"
#include "net/api/stream.h"
#include "net/api/tls.h"
#include "net/api/ucx.h"
#include "tests/conformance/transport_echo.h"

/// transport_peer stream|local|tls|tcp-isolated|ucx|network ADDRESS [CERTIFICATE KEY AUTHORITY | MARK]: echoes at ADDRESS,
/// prints its address, and ends when its standard input does. An 'f' there makes it fork a child, which ends
/// at the same time.
namespace torchspan::net::conformance {
namespace {

class PeerWorld final : public World {
 public:
  PeerWorld(std::string kind, std::string address, MarkedNetworkOptions network)
      : kind_(std::move(kind)),
        address_(std::move(address)),
        network_(std::move(network)),
        executor_(make_executor()) {}
  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string&, Handler& handler,
                                            TransportOptions options) override {
    if (kind_ == "local") return make_local_transport(*executor_, handler, std::move(options));
    if (kind_ == "tls")
      return make_tls_transport(*executor_, handler, std::move(options), network_.network.tls);
    if (kind_ == "network")
      return make_marked_network_transport(*executor_, handler, std::move(options), network_);
    if (kind_ == "ucx") {
      return make_ucx_transport(
          *executor_, handler, std::move(options),
          {.network = UcxNetwork::kIsolated, .devices = "lo", .tls = network_.network.tls});
    }
    return make_stream_transport(*executor_, handler, std::move(options));
  }
  std::string listen_address(const std::string&) override { return address_; }
  std::string unused_address() override { return {}; }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override { return nullptr; }
  std::unique_ptr<EchoPeer> start_echo(const std::string&) override { return nullptr; }

 private:
  const std::string kind_;
  const std::string address_;
  const MarkedNetworkOptions network_;
  const std::unique_ptr<Executor> executor_;
};

}  // namespace
}  // namespace torchspan::net::conformance

int main(int count, char** arguments) {
  using namespace torchspan::net::conformance;
  if (count < 3 || count == 5 || count > 6) return 2;
  torchspan::net::MarkedNetworkOptions network;
  network.network.tls.dead_after = kLongSilence;
  if (count == 4) network.host_mark = arguments[3];
  if (count == 6) {
    network.network.tls.certificate_file = arguments[3];
    network.network.tls.key_file = arguments[4];
    network.network.tls.authority_file = arguments[5];
  }
  std::string kind = arguments[1];
  if (kind == "tcp-isolated") {
    network.network.tls.network = torchspan::net::TcpNetwork::kIsolated;
    kind = "tls";
  }
  PeerWorld world(kind, arguments[2], network);
  Node node(world, "echo", echo_options());
  std::printf("%s\n", node.listen().c_str());
  std::fflush(stdout);
  char c;
  while (::read(STDIN_FILENO, &c, 1) > 0) {
    if (c != 'f') continue;
    if (::fork() == 0) {
      while (::read(STDIN_FILENO, &c, 1) > 0) {
      }
      ::_exit(0);
    }
    std::puts("forked");
    std::fflush(stdout);
  }
  return 0;
}
