#include <arpa/inet.h>
#include <array>
#include <csignal>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "net/api/stream.h"
#include "rendezvous/simulated_world.h"
#include "tests/support/processes.h"

namespace torchspan::rendezvous::sockets_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A socket that listens on a free loopback port, as another program would.
class ForeignListener {
 public:
  ForeignListener() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(socket_, 8), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~ForeignListener() { close(socket_); }
  int port() const { return port_; }
  /// Accepts one connection, sends `text` and closes.
  void answer_once(const std::string& text) const {
    const int peer = accept(socket_, nullptr, nullptr);
    EXPECT_GE(peer, 0);
    EXPECT_EQ(write(peer, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    std::array<char, 4096> sink;
    while (read(peer, sink.data(), sink.size()) > 0) {
    }
    close(peer);
  }

 private:
  int socket_;
  int port_ = 0;
};

/// Workers as threads of this process, over real sockets.
class Sockets : public ::testing::Test {
 protected:
  Sockets() {
    std::string pattern = (std::filesystem::temp_directory_path() / "torchspan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~Sockets() override { std::filesystem::remove_all(folder_); }

  /// A port that no other test gets during this one.
  int free_port() {
    ports_.push_back(torchspan::testing::reserve_port());
    return ports_.back().number();
  }

  MembershipOptions options(int rank, int world_size) const {
    MembershipOptions options;
    options.name = "worker" + std::to_string(rank);
    options.rank = rank;
    options.world_size = world_size;
    options.store_address = "unix:" + folder_ + "/store";
    options.address = "unix:" + folder_ + "/" + options.name;
    options.timeout = seconds(30);
    return options;
  }
  Deadline in(Duration time) const { return executor_->deadline_in(time); }
  std::unique_ptr<Membership> join(Runtime& runtime, MembershipOptions options) const {
    const TransportFactory transports = transports_to(options.store_address, secret_);
    return Membership::join(runtime, transports, std::move(options));
  }
  TransportFactory transports_to(const std::string& store, net::Secret secret) const {
    return store.starts_with("tls:") ? tls_transports(*executor_, std::move(secret))
                                     : stream_transports(*executor_, std::move(secret));
  }
  void run(int count, const std::function<void(int)>& body) const {
    std::vector<Thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.push_back(executor_->spawn("worker", [&body, rank] { body(rank); }));
    }
  }
  void meet(int count, const std::function<void(MembershipOptions&)>& change) const {
    run(count, [&](int rank) {
      Runtime runtime(*executor_, "worker", LogLevel::kOff);
      MembershipOptions mine = options(rank, count);
      change(mine);
      const auto membership = join(runtime, mine);
      EXPECT_EQ(membership->world_size(), count);
      for (int round = 0; round < 50; ++round) {
        const auto all =
            membership->all_gather_bytes("g", Bytes{static_cast<std::byte>(rank)}, {}, in(seconds(30)));
        for (int other = 0; other < count; ++other) {
          EXPECT_EQ(all.at(static_cast<std::size_t>(other)), Bytes{static_cast<std::byte>(other)});
        }
      }
      // The store sends large answers in another way.
      const auto large = [](int of) { return Bytes(std::size_t{40} << 10, static_cast<std::byte>(of)); };
      const auto all = membership->all_gather_bytes("large", large(rank), {}, in(seconds(30)));
      for (int other = 0; other < count; ++other) {
        EXPECT_EQ(all.at(static_cast<std::size_t>(other)), large(other));
      }
      membership->leave(in(seconds(30)));
    });
  }

  std::string folder_;
  std::vector<ReservedPort> ports_;
  std::unique_ptr<Executor> executor_ = make_executor();
  net::Secret secret_ = net::Secret::random();
};

TEST_F(Sockets, WorkersConnectOverUnixSockets) {
  meet(6, [](MembershipOptions&) {});
}

TEST_F(Sockets, WorkersConnectOverLoopback) {
  const std::string store = "tcp:127.0.0.1:" + std::to_string(free_port());
  meet(6, [&](MembershipOptions& options) { options.store_address = store; });
}

TEST_F(Sockets, WorkersConnectOverTls) {
  const std::string store = "tls:127.0.0.1:" + std::to_string(free_port());
  meet(6, [&](MembershipOptions& options) { options.store_address = store; });
}

TEST_F(Sockets, RankZeroMayServeAtAnotherAddressThanAdvertised) {
  const std::string port = std::to_string(free_port());
  meet(3, [&](MembershipOptions& options) {
    options.store_address = "tls:localhost:" + port;
    options.store_listen = "tls:127.0.0.1:" + port;
  });
}

TEST_F(Sockets, RankZeroTellsTheFreePortThatItGot) {
  for (const std::string host : {"tcp:127.0.0.1", "tls:127.0.0.1", "tls:localhost"}) {
    const auto pool = std::make_shared<Pool>(*executor_, PoolOptions{});
    Promise<std::string> ready(pool);
    const Future<std::string> address = ready.future();
    meet(3, [&](MembershipOptions& options) {
      options.store_address = options.rank == 0 ? host + ":0" : address.wait();
      if (host == "tls:localhost") options.store_listen = "tls:127.0.0.1:0";
      options.store_ready = [&](const std::string& store) { ready.set_value(store); };
    });
    EXPECT_TRUE(address.wait().starts_with(host + ":")) << address.wait();
    EXPECT_FALSE(address.wait().ends_with(":0")) << address.wait();
  }
}

TEST_F(Sockets, TheStoreRejectsAnAddressOfAnotherMachine) {
  Runtime runtime(*executor_, "worker", LogLevel::kOff);
  MembershipOptions mine = options(0, 2);
  mine.store_address = "tls:192.0.2.1:29500";
  const Error error = error_of([&] { join(runtime, mine); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("192.0.2.1"), HasSubstr("MASTER_ADDR"), HasSubstr("TORCHSPAN_LISTEN_HOST")));
}

/// Workers that meet at a port of the loopback interface, over plain TCP and over TLS.
class Ports : public Sockets, public ::testing::WithParamInterface<std::string> {
 protected:
  std::string at(int port) const { return GetParam() + ":127.0.0.1:" + std::to_string(port); }
};

TEST_P(Ports, WrongSecretIsDeniedWithAdvice) {
  // Rank 0 is there until it times out. On a busy machine, rank 1 may come later: once more, with more time.
  std::optional<Error> error;
  for (const Duration patience : {seconds(1), seconds(5), seconds(25)}) {
    const std::string store = at(free_port());
    run(2, [&](int rank) {
      Runtime runtime(*executor_, "worker", LogLevel::kOff);
      MembershipOptions mine = options(rank, 2);
      mine.store_address = store;
      mine.timeout = patience;
      if (rank == 0) {
        EXPECT_EQ(error_of([&] { join(runtime, mine); }).kind(), ErrorKind::kTimedOut);
        return;
      }
      const auto transports = transports_to(store, net::Secret::random());
      error = error_of([&] { Membership::join(runtime, transports, mine); });
    });
    if (error->kind() != ErrorKind::kTimedOut) break;
  }
  EXPECT_EQ(error->kind(), ErrorKind::kDenied);
  EXPECT_THAT(error->what(), AllOf(HasSubstr("TORCHSPAN_SECRET_FILE"), HasSubstr("MASTER_PORT")));
}

TEST_P(Ports, PortInUseIsNamedWithAdvice) {
  const ForeignListener other;
  Runtime runtime(*executor_, "worker", LogLevel::kOff);
  MembershipOptions mine = options(0, 2);
  mine.store_address = at(other.port());
  const Error error = error_of([&] { join(runtime, mine); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.what(), AllOf(HasSubstr(std::to_string(other.port())), HasSubstr("MASTER_PORT"),
                                  HasSubstr("ss -ltnp")));
}

TEST_P(Ports, ForeignProgramAtTheAddressIsRecognized) {
  const ForeignListener other;
  const Thread server = executor_->spawn("foreign", [&] {
    other.answer_once(
        "HTTP/1.1 400 Bad Request\r\n\r\n"
        "this is no store of anybody's, "
        "and it says so at some length\r\n");
  });
  Runtime runtime(*executor_, "worker", LogLevel::kOff);
  MembershipOptions mine = options(1, 2);
  mine.store_address = at(other.port());
  const Error error = error_of([&] { join(runtime, mine); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.what(), AllOf(HasSubstr(mine.store_address), HasSubstr("MASTER_PORT")));
}

INSTANTIATE_TEST_SUITE_P(Sockets, Ports, ::testing::Values("tcp", "tls"));

TEST_F(Sockets, AProofBetweenWorkersIsNotValidForTheStore) {
  Runtime runtime(*executor_, "worker", LogLevel::kOff);
  const auto membership = join(runtime, options(0, kOpenWorld));
  const TransportFactory as_worker = [&](const std::string&, net::Handler& handler) {
    net::TransportOptions options;
    options.secret = secret_;
    return net::make_stream_transport(*executor_, handler, options);
  };
  const Error error = error_of([&] { Membership::join(runtime, as_worker, options(1, kOpenWorld)); });
  EXPECT_EQ(error.kind(), ErrorKind::kDenied);
  membership->leave(in(seconds(30)));
}

/// Remembers what it received.
struct DirectJournal : net::Handler {
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>&, net::Message message) override {
    received = std::move(message.header);
  }
  void on_closed(const std::shared_ptr<net::Channel>&, const Error& reason) override {
    closed = reason.kind();
  }
  Bytes received;
  std::optional<ErrorKind> closed;
};

class Direct : public Sockets, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Sockets, Direct, ::testing::Values("unix", "tls"));

TEST_P(Direct, MembersConnectToEachOtherWithAProofOfTheirOwn) {
  const std::string store = GetParam() == std::string("tls") ? "tls:127.0.0.1:" + std::to_string(free_port())
                                                             : options(0, 2).store_address;
  run(2, [&](int rank) {
    Runtime runtime(*executor_, "worker", LogLevel::kOff);
    MembershipOptions mine = options(rank, 2);
    mine.store_address = store;
    const auto membership = join(runtime, mine);
    DirectJournal journal;
    const auto [transport, address] = membership->listen("test", journal);
    EXPECT_TRUE(address.starts_with(GetParam() == std::string("tls") ? "tls:127.0.0.1:" : "tcp:127.0.0.1:"));
    const auto text = std::as_bytes(std::span(address));
    const auto all = membership->all_gather_bytes("addresses", text, {}, in(seconds(30)));
    const std::string other(reinterpret_cast<const char*>(all[1 - rank].data()), all[1 - rank].size());
    const auto channel = transport->connect(other, in(seconds(30)));
    channel->send(text, {});
    while (journal.received.empty()) {
      if (!transport->poll()) transport->wait(in(milliseconds(50)));
    }
    EXPECT_EQ(journal.received, all[1 - rank]);
    // The secret of the store's connections is another one.
    DirectJournal refused;
    const auto as_client = transports_to(store, secret_)("worker.membership", refused);
    as_client->connect(other, in(seconds(30)));
    while (!refused.closed) {
      transport->poll();
      if (!as_client->poll()) as_client->wait(in(milliseconds(5)));
    }
    EXPECT_EQ(refused.closed, ErrorKind::kDenied);
    std::atomic<bool> all_done{false};
    const Thread server = executor_->spawn("server", [&, transport = transport.get()] {
      while (!all_done) {
        if (!transport->poll()) transport->wait(in(milliseconds(5)));
      }
    });
    membership->barrier("end", {}, in(seconds(30)));
    all_done = true;
    membership->leave(in(seconds(30)));
  });
}

TEST_F(Sockets, PlainTcpToAnotherHostIsUnsupported) {
  Runtime runtime(*executor_, "worker", LogLevel::kOff);
  for (const int rank : {0, 1}) {
    MembershipOptions mine = options(rank, 2);
    mine.store_address = "tcp:192.0.2.1:29500";
    const Error error = error_of([&] { join(runtime, mine); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("192.0.2.1"));
  }
}

TEST_F(Sockets, AKilledProcessIsReported) {
  const pid_t child = fork();
  if (child == 0) {
    const auto executor = make_executor();
    Runtime runtime(*executor, "worker1", LogLevel::kOff);
    const auto membership = Membership::join(runtime, stream_transports(*executor, secret_), options(1, 2));
    membership->barrier("in", {}, executor->deadline_in(seconds(30)));
    pause();
    _exit(0);
  }
  Runtime runtime(*executor_, "worker0", LogLevel::kOff);
  const auto membership = join(runtime, options(0, 2));
  EXPECT_EQ(membership->member(1).pid, child);
  membership->barrier("in", {}, in(seconds(30)));
  const auto parker = executor_->make_parker();
  membership->on_death([&](const Member& member, const Error&) {
    EXPECT_EQ(member.pid, child);
    parker->unpark();
  });
  EXPECT_EQ(kill(child, SIGKILL), 0);
  EXPECT_TRUE(parker->park(in(seconds(10))));
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  const Error error = error_of([&] { membership->barrier("b", {}, in(seconds(30))); });
  EXPECT_THAT(error.what(), HasSubstr("worker1 (rank 1, pid " + std::to_string(child)));
  membership->leave(in(seconds(10)));
}

/// A worker in a separate process, which forks a child that outlives it. The child ends when `alive` is
/// closed.
[[noreturn]] void join_and_fork(const TransportFactory& transports, MembershipOptions options, int alive) {
  const auto executor = make_executor();
  Runtime runtime(*executor, options.name, LogLevel::kOff);
  const auto membership = Membership::join(runtime, transports, std::move(options));
  membership->barrier("in", {}, executor->deadline_in(seconds(30)));
  if (fork() == 0) {
    char byte;
    while (read(alive, &byte, 1) > 0) {
    }
    _exit(0);
  }
  membership->barrier("forked", {}, executor->deadline_in(seconds(30)));
  pause();
  _exit(0);
}

TEST_F(Sockets, ADeathIsReportedThoughAForkedChildLives) {
  for (const std::string scheme : {"unix", "tcp", "tls"}) {
    SCOPED_TRACE(scheme);
    MembershipOptions mine = options(0, 2), its = options(1, 2);
    if (scheme != "unix") {
      mine.store_address = its.store_address = scheme + ":127.0.0.1:" + std::to_string(free_port());
    }
    int alive[2];
    ASSERT_EQ(pipe(alive), 0);
    const pid_t child = fork();
    if (child == 0) {
      close(alive[1]);
      const auto executor = make_executor();
      join_and_fork(
          scheme == "tls" ? tls_transports(*executor, secret_) : stream_transports(*executor, secret_), its,
          alive[0]);
    }
    Runtime runtime(*executor_, "worker0", LogLevel::kOff);
    const auto membership = join(runtime, mine);
    const auto died = executor_->make_parker();
    membership->on_death([&](const Member&, const Error&) { died->unpark(); });
    membership->barrier("in", {}, in(seconds(30)));
    membership->barrier("forked", {}, in(seconds(30)));
    EXPECT_EQ(kill(child, SIGKILL), 0);
    EXPECT_TRUE(died->park(in(seconds(10)))) << "the child's copy of the connection keeps it open";
    waitpid(child, nullptr, 0);
    membership->leave(in(seconds(10)));
    close(alive[1]);
    close(alive[0]);
  }
}

TEST_F(Sockets, AStoppedWorkerOfAnotherHostIsSilentAndNotEnded) {
  MembershipOptions mine = options(0, 2), its = options(1, 2);
  mine.store_address = its.store_address = "tls:127.0.0.1:" + std::to_string(free_port());
  mine.host_id = "here";
  its.host_id = "there";
  const net::TlsOptions tls = {.heartbeat = milliseconds(100), .dead_after = seconds(1)};
  const pid_t child = fork();
  if (child == 0) {
    const auto executor = make_executor();
    Runtime runtime(*executor, "worker1", LogLevel::kOff);
    const auto membership = Membership::join(runtime, tls_transports(*executor, secret_, tls), its);
    membership->barrier("in", {}, executor->deadline_in(seconds(30)));
    pause();
    _exit(0);
  }
  Runtime runtime(*executor_, "worker0", LogLevel::kOff);
  const auto membership = Membership::join(runtime, tls_transports(*executor_, secret_, tls), mine);
  const auto died = executor_->make_parker();
  std::string cause;
  membership->on_death([&](const Member&, const Error& reason) {
    cause = reason.message();
    died->unpark();
  });
  membership->barrier("in", {}, in(seconds(30)));
  EXPECT_EQ(kill(child, SIGSTOP), 0);
  EXPECT_TRUE(died->park(in(seconds(10))));
  EXPECT_THAT(cause, AllOf(HasSubstr("silent for 1.0 s (no heartbeat); its process is stopped, or"),
                           ::testing::Not(HasSubstr("its process ended"))));
  EXPECT_EQ(kill(child, SIGKILL), 0);
  waitpid(child, nullptr, 0);
  membership->leave(in(seconds(10)));
}

TEST_F(Sockets, StoppedProcessIsNeitherDeadNorPresent) {
  const pid_t child = fork();
  if (child == 0) {
    const auto executor = make_executor();
    Runtime runtime(*executor, "worker1", LogLevel::kOff);
    MembershipOptions mine = options(1, kOpenWorld);
    mine.rank = kAnyRank;
    const auto membership = Membership::join(runtime, stream_transports(*executor, secret_), mine);
    membership->barrier("in", {0, 1}, executor->deadline_in(seconds(30)));
    pause();
    _exit(0);
  }
  Runtime runtime(*executor_, "worker0", LogLevel::kOff);
  const auto membership = join(runtime, options(0, kOpenWorld));
  const auto came = executor_->make_parker(), died = executor_->make_parker();
  membership->watch({.joined = [&](const Member&) { came->unpark(); },
                     .died = [&](const Member&, const Error&) { died->unpark(); }});
  ASSERT_TRUE(came->park(in(seconds(30))));
  membership->barrier("in", {0, 1}, in(seconds(30)));
  EXPECT_EQ(membership->condition(0), Condition::kPresent);
  EXPECT_EQ(membership->condition(1), Condition::kPresent);
  int status = 0;
  EXPECT_EQ(kill(child, SIGSTOP), 0);
  EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
  EXPECT_EQ(membership->condition(1), Condition::kStopped);
  EXPECT_TRUE(membership->is_present(1));
  EXPECT_EQ(kill(child, SIGCONT), 0);
  EXPECT_EQ(waitpid(child, &status, WCONTINUED), child);
  EXPECT_EQ(membership->condition(1), Condition::kPresent);
  EXPECT_EQ(kill(child, SIGKILL), 0);
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(died->park(in(seconds(10))));
  EXPECT_EQ(membership->condition(1), Condition::kDead);
  EXPECT_THAT(error_of([&] { membership->condition(2); }).what(), HasSubstr("no rank 2"));
  membership->leave(in(seconds(10)));
}

TEST_F(Sockets, WorkersOfAnOpenWorldJoinAndLeaveUnderHeartbeats) {
  constexpr int kWorkers = 4;
  constexpr std::uint32_t kLives = 5;
  run(kWorkers, [&](int number) {
    Runtime runtime(*executor_, "worker", LogLevel::kOff);
    MembershipOptions mine = options(number, kOpenWorld);
    mine.host_id = "host" + std::to_string(number);
    mine.heartbeat = milliseconds(2);
    mine.dead_after = seconds(20);
    if (number == 0) {
      const auto all_left = executor_->make_parker();
      std::uint32_t left = 0;
      const auto membership = join(runtime, mine);
      membership->watch(
          {.died = [](const Member& member, const Error&) { ADD_FAILURE() << describe(member) << " died"; },
           .left =
               [&](const Member&) {
                 if (++left == (kWorkers - 1) * kLives) all_left->unpark();
               }});
      EXPECT_TRUE(all_left->park(in(seconds(60))));
      EXPECT_EQ(membership->world_size(), kWorkers);
      membership->leave(in(seconds(30)));
      return;
    }
    for (std::uint32_t life = 0; life < kLives; ++life) {
      const auto membership = join(runtime, mine);
      EXPECT_EQ(membership->self().incarnation, life);
      executor_->sleep(milliseconds(10));
      EXPECT_EQ(membership->all_gather_bytes("alone", Bytes(1), {number}, in(seconds(30))).size(), 1u);
      membership->leave(in(seconds(30)));
    }
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::sockets_test
