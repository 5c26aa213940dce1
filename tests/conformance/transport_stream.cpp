#include <cstdlib>
#include <filesystem>
#include <map>

#include <torchspan/net/stream.h>

#include "tests/conformance/transport_echo.h"
#include "tests/conformance/transport_sockets.h"

/// The socket transport's rows in the suite: Unix and TCP, peers as threads and as processes.
namespace torchspan::net::conformance {
namespace {

class StreamWorld final : public World {
 public:
  StreamWorld(Address::Kind kind, Peers peers) : kind_(kind), peers_(peers), executor_(make_executor()) {
    std::string name = testing::TempDir() + "torchspan-XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~StreamWorld() override { std::filesystem::remove_all(directory_); }

  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string&, Handler& handler,
                                            TransportOptions options) override {
    return make_stream_transport(*executor_, handler, std::move(options));
  }
  std::string listen_address(const std::string& name) override {
    if (kind_ == Address::Kind::kUnix) return "unix:" + directory_ + "/" + name;
    const auto known = echoes_.find(name);
    return known == echoes_.end() ? "tcp:127.0.0.1:0" : known->second;
  }
  std::string deserted_address() override {
    if (kind_ == Address::Kind::kUnix) return listen_address("nobody");
    return reserve_port(reserved_, "tcp");
  }
  std::unique_ptr<Stranger> make_stranger() override { return std::make_unique<SocketStranger>(); }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    std::unique_ptr<EchoPeer> echo;
    if (peers_ == Peers::kProcesses) {
      echo = std::make_unique<ProcessEcho>(std::vector{listen_address(name)});
    } else {
      echo = std::make_unique<LocalEcho>(*this, name);
    }
    echoes_[name] = echo->address();
    return echo;
  }

 private:
  const Address::Kind kind_;
  const Peers peers_;
  const std::unique_ptr<Executor> executor_;
  std::string directory_;
  Descriptor reserved_;
  std::map<std::string, std::string> echoes_;
};

Backend stream(const std::string& name, Address::Kind kind, Peers peers) {
  return {name, [=](const std::function<void(World&)>& body) {
            StreamWorld world(kind, peers);
            body(world);
          }};
}

const Backend kUnix = stream("Unix", Address::Kind::kUnix, Peers::kThreads);
const Backend kTcp = stream("Tcp", Address::Kind::kTcp, Peers::kThreads);
const Backend kUnixProcesses = stream("UnixProcesses", Address::Kind::kUnix, Peers::kProcesses);
const Backend kTcpProcesses = stream("TcpProcesses", Address::Kind::kTcp, Peers::kProcesses);

INSTANTIATE_TEST_SUITE_P(Stream, TransportConformance, testing::Values(kUnix, kTcp), backend_name);
INSTANTIATE_TEST_SUITE_P(Stream, TransportPeerConformance,
                         testing::Values(kUnix, kTcp, kUnixProcesses, kTcpProcesses), backend_name);

}  // namespace
}  // namespace torchspan::net::conformance
