#include <cstdlib>
#include <filesystem>
#include <map>

#include "net/api/local.h"
#include "net/api/stream.h"
#include "tests/conformance/transport_echo.h"
#include "tests/conformance/transport_sockets.h"

/// The rows of the transports over sockets: stream over Unix and TCP, local, and one of each; peers as
/// threads and as processes.
namespace torchspan::net::conformance::transport_stream {
namespace {

/// The names of this side's transport and of the transport of an echo in a separate process.
struct Kinds {
  std::string own;
  std::string echo;
};

class StreamWorld final : public World {
 public:
  StreamWorld(Address::Kind kind, Peers peers, Kinds kinds)
      : kind_(kind), peers_(peers), kinds_(std::move(kinds)), executor_(make_executor()) {
    std::string name = ::testing::TempDir() + "torchspan-XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~StreamWorld() override { std::filesystem::remove_all(directory_); }

  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string&, Handler& handler,
                                            TransportOptions options) override {
    return kinds_.own == "local" ? make_local_transport(*executor_, handler, std::move(options))
                                 : make_stream_transport(*executor_, handler, std::move(options));
  }
  std::string listen_address(const std::string& name) override {
    if (kind_ == Address::Kind::kUnix) return "unix:" + directory_ + "/" + name;
    const auto known = echoes_.find(name);
    return known == echoes_.end() ? "tcp:127.0.0.1:0" : known->second;
  }
  std::string unused_address() override {
    if (kind_ == Address::Kind::kUnix) return listen_address("unused");
    return reserve_port(reserved_, "tcp");
  }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override {
    return std::make_unique<UnauthenticatedSocketPeer>();
  }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    std::unique_ptr<EchoPeer> echo;
    if (peers_ == Peers::kProcesses) {
      echo = std::make_unique<ProcessEcho>(std::vector{kinds_.echo, listen_address(name)});
    } else {
      echo = std::make_unique<LocalEcho>(*this, name);
    }
    echoes_[name] = echo->address();
    return echo;
  }

 private:
  const Address::Kind kind_;
  const Peers peers_;
  const Kinds kinds_;
  const std::unique_ptr<Executor> executor_;
  std::string directory_;
  Descriptor reserved_;
  std::map<std::string, std::string> echoes_;
};

Backend sockets(const std::string& name, Address::Kind kind, Peers peers,
                const Kinds& kinds = {"stream", "stream"}) {
  return {name, [=](const std::function<void(World&)>& body) {
            StreamWorld world(kind, peers, kinds);
            body(world);
          }};
}

const Backend kUnix = sockets("Unix", Address::Kind::kUnix, Peers::kThreads);
const Backend kTcp = sockets("Tcp", Address::Kind::kTcp, Peers::kThreads);
const Backend kLocal = sockets("Local", Address::Kind::kUnix, Peers::kThreads, {"local", "local"});
const Backend kUnixProcesses = sockets("UnixProcesses", Address::Kind::kUnix, Peers::kProcesses);
const Backend kTcpProcesses = sockets("TcpProcesses", Address::Kind::kTcp, Peers::kProcesses);
const Backend kLocalProcesses =
    sockets("LocalProcesses", Address::Kind::kUnix, Peers::kProcesses, {"local", "local"});
const Backend kLocalToStream =
    sockets("LocalToStream", Address::Kind::kUnix, Peers::kProcesses, {"local", "stream"});
const Backend kStreamToLocal =
    sockets("StreamToLocal", Address::Kind::kUnix, Peers::kProcesses, {"stream", "local"});

INSTANTIATE_TEST_SUITE_P(Stream, TransportConformance, ::testing::Values(kUnix, kTcp, kLocal), backend_name);
INSTANTIATE_TEST_SUITE_P(Stream, TransportPeerConformance,
                         ::testing::Values(kUnix, kTcp, kLocal, kUnixProcesses, kTcpProcesses,
                                           kLocalProcesses, kLocalToStream, kStreamToLocal),
                         backend_name);

}  // namespace
}  // namespace torchspan::net::conformance::transport_stream
