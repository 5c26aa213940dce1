#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <netinet/in.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <torchspan/net/local.h>
#include <torchspan/net/stream.h>

#include "net/descriptor.h"
#include "net/stream/address.h"
#include "tests/conformance/transport_echo.h"

/// The rows of the transports that dial sockets: stream over Unix and TCP, local, and one of each; peers as
/// threads and as processes.
namespace torchspan::net::conformance {
namespace {

enum class Peers { kThreads, kProcesses };

/// Which transport this side makes, and which an echo in its own process.
struct Kinds {
  std::string own;
  std::string echo;
};

class SocketStranger final : public Stranger {
 public:
  void dial(const std::string& text, BytesView bytes) override {
    const Address address = parse_address(text);
    socket_.reset(::socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(socket_.get(), address.raw(), address.socket_size), 0);
    send(bytes);
  }
  void send(BytesView bytes) override {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
  bool hears_hang_up() override {
    for (;;) {
      pollfd event{socket_.get(), POLLIN, 0};
      if (::poll(&event, 1, 30'000) != 1) return false;
      std::byte bytes[512];
      if (::recv(socket_.get(), bytes, sizeof bytes, 0) <= 0) return true;
    }
  }

 private:
  Descriptor socket_;
};

/// An echo in a process of its own, which ends with our end of its standard input.
class ProcessEcho final : public EchoPeer {
 public:
  ProcessEcho(std::string kind, const std::string& listen_address) {
    int input[2], output[2];
    if (::pipe2(input, O_CLOEXEC) != 0 || ::pipe2(output, O_CLOEXEC) != 0) std::abort();
    input_.reset(input[1]);
    const Descriptor its_input(input[0]), its_output(output[1]), answer(output[0]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, its_input.get(), 0);
    posix_spawn_file_actions_adddup2(&actions, its_output.get(), 1);
    const std::string program =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "transport_peer";
    std::string name = "transport_peer", address = listen_address;
    char* arguments[] = {name.data(), kind.data(), address.data(), nullptr};
    const int failed = ::posix_spawn(&process_, program.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    EXPECT_EQ(failed, 0) << program;
    its_output_end(answer, const_cast<Descriptor&>(its_output));
  }
  ~ProcessEcho() override {
    input_.reset();
    reap();
  }

  std::string address() const override { return address_; }
  void kill() override {
    ::kill(process_, SIGKILL);
    reap();
  }

 private:
  /// Reads the address that the peer prints once it listens.
  void its_output_end(const Descriptor& answer, Descriptor& its_output) {
    its_output.reset();
    char c;
    while (::read(answer.get(), &c, 1) == 1 && c != '\n') address_ += c;
    EXPECT_FALSE(address_.empty()) << "the peer did not start";
  }
  void reap() {
    if (process_ > 0) ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }

  Descriptor input_;
  pid_t process_ = 0;
  std::string address_;
};

class StreamWorld final : public World {
 public:
  StreamWorld(Address::Kind kind, Peers peers, Kinds kinds)
      : kind_(kind), peers_(peers), kinds_(std::move(kinds)), executor_(make_executor()) {
    std::string name = testing::TempDir() + "torchspan-XXXXXX";
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
  std::string deserted_address() override {
    if (kind_ == Address::Kind::kUnix) return listen_address("nobody");
    // Bound, so that nobody else gets the port, but not listening.
    reserved_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Address address = parse_address("tcp:127.0.0.1:0");
    EXPECT_EQ(::bind(reserved_.get(), address.raw(), address.socket_size), 0);
    socklen_t size = sizeof address.socket;
    ::getsockname(reserved_.get(), reinterpret_cast<sockaddr*>(&address.socket), &size);
    return tcp_text(address.socket);
  }
  std::unique_ptr<Stranger> make_stranger() override { return std::make_unique<SocketStranger>(); }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    std::unique_ptr<EchoPeer> echo;
    if (peers_ == Peers::kProcesses) {
      echo = std::make_unique<ProcessEcho>(kinds_.echo, listen_address(name));
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

INSTANTIATE_TEST_SUITE_P(Stream, TransportConformance, testing::Values(kUnix, kTcp, kLocal), backend_name);
INSTANTIATE_TEST_SUITE_P(Stream, TransportPeerConformance,
                         testing::Values(kUnix, kTcp, kLocal, kUnixProcesses, kTcpProcesses, kLocalProcesses,
                                         kLocalToStream, kStreamToLocal),
                         backend_name);

}  // namespace
}  // namespace torchspan::net::conformance
