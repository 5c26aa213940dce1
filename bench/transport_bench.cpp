// Section transport: messages between two processes of this host, over the transport between hosts, without calls
// and tensors: encrypted (tls) and not (plain). The peer is a plain TCP socket with blocking calls; the limits are
// encrypting and decrypting on one core, and copying. TORCHSPAN_BENCH_ROUNDS=1 gives quick, rough figures.
//   --link RATE   between two simulated hosts (network namespaces; root only) whose link has this rate in both
//                 directions, in tc's words, such as 100mbit
//   --delay MS --rate MBIT --loss PERCENT   likewise; a process in user space is the link (tests/support/slow_network.h)
#include <arpa/inet.h>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/encryption.h"
#include "bench/harness.h"
#include "bench/slow_link.h"
#include "net/api/tls.h"
#include "tests/support/hosts.h"

namespace torchspan::bench {
namespace {

using net::TcpNetwork;

struct Size {
  std::string name;
  std::size_t bytes;
  int repeats;
};
const std::vector<Size> kLoopbackSizes = {{"64KiB", 64 << 10, 200},
                                          {"1MiB", 1 << 20, 60},
                                          {"16MiB", 16 << 20, 10},
                                          {"64MiB", 64 << 20, 4},
                                          {"256MiB", 256 << 20, 1}};
const std::vector<Size> kLinkSizes = {{"64KiB", 64 << 10, 10}, {"1MiB", 1 << 20, 3}, {"16MiB", 16 << 20, 1}};
constexpr int kInFlight = 64;

/// Where the two processes are: on this host, or on two simulated ones.
class Places {
 public:
  Places() = default;
  explicit Places(const std::string& rate)
      : network_(std::make_unique<testing::TestNetwork>()), server_host_(testing::TestNetwork::kFar) {
    use(*network_);
    const std::string shape = " root tbf rate " + rate + " burst 256kb latency 50ms";
    if (!network_->near.run("tc qdisc add dev near" + shape) ||
        !network_->far.run("tc qdisc add dev far" + shape))
      throw std::runtime_error("tc cannot give the link the rate " + rate);
  }
  explicit Places(const testing::LinkQuality& link)
      : slow_network_(std::make_unique<testing::SlowNetwork>(link)),
        server_host_(testing::SlowNetwork::kFar) {
    use(*slow_network_);
  }

  const std::string& server_host() const { return server_host_; }
  void enter_caller() const { enter(near_); }
  void enter_server() const { enter(far_); }
  const std::vector<Size>& sizes() const { return near_ != nullptr ? kLinkSizes : kLoopbackSizes; }

 private:
  template <class Network>
  void use(const Network& network) {
    if (!network.trouble().empty()) throw std::runtime_error("no two hosts: " + network.trouble());
    near_ = &network.near;
    far_ = &network.far;
  }
  static void enter(const testing::TestHost* host) {
    if (host == nullptr) return;
    const int space =
        ::open(("/proc/" + std::to_string(host->pid()) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) throw std::runtime_error("cannot enter the host");
    ::close(space);
  }

  std::unique_ptr<testing::TestNetwork> network_;
  std::unique_ptr<testing::SlowNetwork> slow_network_;
  const testing::TestHost* near_ = nullptr;
  const testing::TestHost* far_ = nullptr;
  std::string server_host_ = "127.0.0.1";
};

void require(bool good, const char* what) {
  if (!good) throw std::runtime_error(what);
}

/// A forked copy of this process that runs `serve`, which writes a line with its address to a pipe.
class Server {
 public:
  template <class Serve>
  Server(const Places& places, const Serve& serve) {
    int ends[2];
    require(::pipe(ends) == 0, "no pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      places.enter_server();
      serve(ends[1], places.server_host());
      ::_exit(1);
    }
    ::close(ends[1]);
    for (char c; ::read(ends[0], &c, 1) == 1 && c != '\n';) address_ += c;
    ::close(ends[0]);
    require(!address_.empty(), "the other process did not start");
  }
  ~Server() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Server(const Server&) = delete;
  const std::string& address() const { return address_; }

  static void announce(int pipe, const std::string& address) {
    require(::write(pipe, (address + "\n").data(), address.size() + 1) > 0, "the pipe broke");
  }

 private:
  pid_t pid_ = -1;
  std::string address_;
};

net::TransportOptions options() {
  net::TransportOptions options;
  options.secret = net::Secret::from_bytes(Bytes(32, std::byte{'k'}));
  return options;
}

/// Only one of the transports is driven at a time, so that the others are silent for long.
net::TlsOptions tls_options(TcpNetwork network) {
  return {.network = network, .dead_after = std::chrono::hours(1)};
}

/// Answers each message with an empty one.
class Answering final : public net::Handler {
 public:
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message) override {
    channel->send({}, {});
  }
  void on_closed(const std::shared_ptr<net::Channel>&, const Error&) override { ::_exit(0); }
};

void answer(int pipe, const std::string& host, TcpNetwork network) {
  const auto executor = make_executor();
  Answering handler;
  const auto transport = net::make_tls_transport(*executor, handler, options(), tls_options(network));
  Server::announce(pipe, transport->listen("tls:" + host + ":0"));
  for (;;) {
    if (!transport->poll()) transport->wait(Deadline::never());
  }
}

/// The other end of answer().
class Connected final : public net::Handler {
 public:
  Connected(Executor& executor, const Places& places, TcpNetwork network)
      : server_(places, [network](int pipe, const std::string& host) { answer(pipe, host, network); }),
        transport_(net::make_tls_transport(executor, *this, options(), tls_options(network))),
        channel_(transport_->connect(server_.address(), Deadline::never())) {}

  /// Sends `count` messages and waits for the answers.
  void exchange(int count, BytesView header, std::span<const Segment> segments) {
    const std::size_t wanted = answers_ + static_cast<std::size_t>(count);
    for (int i = 0; i < count; ++i) channel_->send(header, segments);
    while (answers_ < wanted) {
      if (!transport_->poll()) transport_->wait(Deadline::never());
    }
  }
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>&, net::Message) override { ++answers_; }
  void on_closed(const std::shared_ptr<net::Channel>&, const Error& reason) override {
    std::fprintf(stderr, "bench_transport: %s\n", reason.what());
    std::abort();
  }

 private:
  const Server server_;
  const std::unique_ptr<net::Transport> transport_;
  const std::shared_ptr<net::Channel> channel_;
  std::size_t answers_ = 0;
};

bool move_all(int socket, std::byte* data, std::size_t size, bool send) {
  while (size != 0) {
    const ssize_t moved = send ? ::send(socket, data, size, MSG_NOSIGNAL) : ::recv(socket, data, size, 0);
    if (moved <= 0) return false;
    data += moved;
    size -= static_cast<std::size_t>(moved);
  }
  return true;
}

void set_no_delay(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// Receives a size and as many bytes, and answers with one byte, for ever.
void answer_plainly(int pipe, const std::string& host) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = ::inet_addr(host.c_str());
  socklen_t length = sizeof place;
  auto* const raw = reinterpret_cast<sockaddr*>(&place);
  require(::bind(listener, raw, length) == 0 && ::listen(listener, 1) == 0 &&
              ::getsockname(listener, raw, &length) == 0,
          "cannot listen");
  Server::announce(pipe, std::to_string(ntohs(place.sin_port)));
  const int socket = ::accept(listener, nullptr, nullptr);
  set_no_delay(socket);
  const Buffer memory = allocate_buffer(kLoopbackSizes.back().bytes);
  std::uint64_t size = 0;
  auto* const number = reinterpret_cast<std::byte*>(&size);
  while (move_all(socket, number, sizeof size, false) && move_all(socket, memory.data, size, false) &&
         move_all(socket, number, 1, true)) {
  }
}

class PlainSocket {
 public:
  explicit PlainSocket(const Places& places)
      : server_(places, answer_plainly), socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = ::inet_addr(places.server_host().c_str());
    place.sin_port = htons(static_cast<std::uint16_t>(std::stoi(server_.address())));
    require(::connect(socket_, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0, "cannot connect");
    set_no_delay(socket_);
  }
  ~PlainSocket() { ::close(socket_); }
  PlainSocket(const PlainSocket&) = delete;

  void exchange(int count, std::byte* data, std::size_t size) const {
    std::uint64_t number = size;
    std::byte answer{};
    for (int i = 0; i < count; ++i) {
      require(move_all(socket_, reinterpret_cast<std::byte*>(&number), sizeof number, true) &&
                  move_all(socket_, data, size, true),
              "the connection broke");
    }
    for (int i = 0; i < count; ++i) require(move_all(socket_, &answer, 1, false), "the connection broke");
  }

 private:
  const Server server_;
  const int socket_;
};

struct Connections {
  const PlainSocket& plain;
  Connected& tls;
  Connected& isolated;
};

void add_small(Bench& bench, const Connections& to) {
  const std::string suffix = "in_flight_64";
  bench.add("tcp/" + suffix, 100, [&plain = to.plain] {
    std::byte bytes[64] = {};
    plain.exchange(kInFlight, bytes, sizeof bytes);
  });
  for (const auto& [name, connected] : {std::pair("/tls", &to.tls), std::pair("/plain", &to.isolated)}) {
    bench.add("transport/" + suffix + name, 100,
              [connected = connected] { connected->exchange(kInFlight, Bytes(64), {}); },
              {.peer = "tcp/" + suffix});
  }
}

void add_bulk(Bench& bench, const std::vector<Size>& sizes, const Connections& to) {
  for (const Size& size : sizes) {
    const Buffer memory = allocate_buffer(size.bytes);
    std::memset(memory.data, 1, memory.size);
    const std::string limit = "limit/encryption/" + size.name;
    bench.add(limit, size.repeats, [work = std::make_shared<Encryption>(size.bytes)] { work->once(); });
    bench.add("tcp/one_way/" + size.name, size.repeats,
              [memory, &plain = to.plain] { plain.exchange(1, memory.data, memory.size); });
    for (const auto& [name, connected] : {std::pair("/tls", &to.tls), std::pair("/plain", &to.isolated)}) {
      bench.add("transport/one_way/" + size.name + name, size.repeats,
                [memory, connected = connected] {
                  const Segment segment{memory.data, memory.size, memory.owner};
                  connected->exchange(1, {}, std::span(&segment, 1));
                },
                {.limit = connected == &to.tls ? limit : "", .peer = "tcp/one_way/" + size.name});
    }
  }
}

void conduct(const Places& places) {
  places.enter_caller();
  const PlainSocket plain(places);
  const auto executor = make_executor();
  Connected tls(*executor, places, TcpNetwork::kEncrypted),
      isolated(*executor, places, TcpNetwork::kIsolated);
  Bench bench(*executor);
  add_small(bench, {plain, tls, isolated});
  add_bulk(bench, places.sizes(), {plain, tls, isolated});
  bench.run(rounds_or(7));
  print_section(bench.metrics());
}

}  // namespace
}  // namespace torchspan::bench

int main(int count, char** values) {
  using namespace torchspan;
  using namespace torchspan::bench;
  try {
    std::optional<testing::LinkQuality> link;
    std::string rate;
    for (int i = 1; i < count; i += 2) {
      const std::string option = values[i];
      if (i + 1 < count && option == "--link") {
        rate = values[i + 1];
      } else if (i + 1 >= count || !read_link_option(option, values[i + 1], link)) {
        throw std::invalid_argument("'" + option + "': the options are --link RATE, or " + kSlowLinkOptions);
      }
    }
    conduct(link ? Places(*link) : rate.empty() ? Places() : Places(rate));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_transport: %s\n", error.what());
    return 1;
  }
}
