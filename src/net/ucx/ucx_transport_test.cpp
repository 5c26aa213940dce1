#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <set>
#include <sstream>

#include <torchspan/detail/core/metrics.h>

#include "core/api/sim_executor.h"
#include "net/tls/tls_test_tools.h"
#include "net/tls/tls_transport.h"
#include "net/ucx/greeting.h"
#include "net/ucx/ucx_worker.h"

/// What only the UCX transport has. UCX's TCP on the loopback interface stands in for RDMA.
namespace torchspan::net::ucx_transport_test {
namespace {

using ::testing::HasSubstr;

UcxOptions on_loopback() { return {.network = UcxNetwork::kIsolated, .devices = "lo"}; }

class UcxTransportTest : public TlsTest {
 protected:
  void start(TransportOptions options, UcxOptions ucx = on_loopback()) {
    options.secret = test_secret();
    ucx.metrics = &metrics_;
    transport_ = make_ucx_transport(*executor_, journal_, std::move(options), std::move(ucx));
    address_ = transport_->listen("ucx:127.0.0.1:0");
  }
  /// In simulated time: the transport waits seconds for devices that are not there yet.
  void start_later(const UcxOptions& ucx) {
    SimExecutor executor(1);
    executor.run([&] {
      TransportOptions options;
      options.secret = test_secret();
      make_ucx_transport(executor, journal_, std::move(options), ucx);
    });
  }
  std::uint64_t counted(const std::string& name) { return metrics_.counter(name).value(); }

  Metrics metrics_;
};

/// An authenticated peer that uses TLS and UCX as the test directs.
class OddPeer {
 public:
  OddPeer(Executor& executor, const std::string& address)
      : tls_(executor, journal_, options(), {.lanes = 0}, "ucx"),
        worker_(executor, on_loopback()),
        wire_(tls_.connect(address, Deadline::never())) {}

  UcxGreeting greeting() const {
    return {worker_.library().major, worker_.library().minor, kLabel, worker_.address()};
  }
  void say(BytesView note) { wire_->send(note, {}); }
  void step() {
    tls_.poll();
    worker_.progress();
    for (const UcxWorker::Arrival& arrival : worker_.take_events().arrivals) {
      heard_hello_ |= arrival.kind == UcxTask::Kind::kHello && arrival.label.channel == kLabel;
    }
    if (theirs_ || journal_.received.empty()) return;
    theirs_ = std::get<UcxGreeting>(decode_ucx_note(journal_.received.at(0).header, "transport"));
  }
  bool is_greeted() const { return theirs_.has_value(); }
  bool heard_hello() const { return heard_hello_; }
  std::uint64_t their_label() const { return theirs_->channel; }
  void send(UcxTask::Kind kind, UcxLabel label, Bytes bytes) {
    if (!route_) route_ = worker_.open_route(theirs_->address);
    auto task = std::make_unique<UcxTask>();
    task->kind = kind;
    task->label = label;
    const auto kept = std::make_shared<Bytes>(bytes);
    task->segment = {kept->data(), kept->size(), kept};
    task->chunk = std::move(bytes);
    worker_.send(*route_, task, true);
  }

 private:
  static TransportOptions options() {
    TransportOptions options;
    options.secret = test_secret();
    return options;
  }

  static constexpr std::uint64_t kLabel = 4711;
  TlsJournal journal_;
  TlsTransport tls_;
  UcxWorker worker_;
  const std::shared_ptr<Channel> wire_;
  std::optional<UcxGreeting> theirs_;
  bool heard_hello_ = false;
  std::shared_ptr<UcxRoute> route_;
};

TEST_F(UcxTransportTest, RejectsANetworkThatIsNotDeclaredIsolated) {
  if (std::filesystem::exists("/sys/class/infiniband")) GTEST_SKIP() << "there is RDMA here";
  try {
    start_later({});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.message(), HasSubstr("UcxNetwork::kIsolated"));
    EXPECT_THAT(error.message(), HasSubstr("tls transport"));
  }
}

TEST_F(UcxTransportTest, AdvisesAboutAMissingDevice) {
  try {
    start_later({.network = UcxNetwork::kIsolated, .devices = "nosuch0"});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.message(), HasSubstr("UcxOptions::devices"));
  }
}

std::set<std::string> listening_addresses() {
  std::set<std::string> inodes, addresses;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored);
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      const std::vector<std::string> fields{std::istream_iterator<std::string>(words), {}};
      if (fields.size() > 9 && fields[3] == "0A" && inodes.contains(fields[9])) {
        addresses.insert(fields[1].substr(0, fields[1].find(':')));
      }
    }
  }
  return addresses;
}

TEST_F(UcxTransportTest, OpensPortsOnItsDevicesOnly) {
  start({});
  EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F"}) << "127.0.0.1, as the system writes it";
}

TEST_F(UcxTransportTest, LeavesTheProcessesSignalsAlone) {
  const auto answers = [] {
    std::vector<void*> handlers;
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGHUP, SIGPIPE, SIGUSR1}) {
      struct sigaction action {};
      ::sigaction(signal, nullptr, &action);
      handlers.push_back(reinterpret_cast<void*>(action.sa_sigaction));
    }
    return handlers;
  };
  const std::vector<void*> before = answers();
  start({});
  transport_->connect(address_, Deadline::never());
  drive_until([&] { return journal_.accepted.size() == 1; });
  EXPECT_EQ(answers(), before);
}

TEST_F(UcxTransportTest, ReceivesLargeSegmentsByRendezvousInMemoryOfTheAllocator) {
  UcxOptions ucx = on_loopback();
  ucx.rendezvous_from = 1000;
  std::vector<std::size_t> asked;
  TransportOptions options;
  options.allocator = [&](std::size_t size) {
    asked.push_back(size);
    return allocate_buffer(size);
  };
  start(options, ucx);
  // Both ends are in this process, so the counters cover both.
  const auto channel = transport_->connect(address_, Deadline::never());
  std::vector<Bytes> sent;
  for (std::size_t size : {999u, 1000u, 300'000u, 5'000'000u}) {
    sent.emplace_back(size, std::byte(size % 251));
    channel->send({}, std::array{Segment{sent.back().data(), size, nullptr}});
  }
  drive_until([&] { return journal_.received.size() == sent.size(); });
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const Buffer& got = journal_.received[i].segments.at(0);
    ASSERT_EQ(got.size, sent[i].size());
    EXPECT_EQ(std::memcmp(got.data, sent[i].data(), got.size), 0);
  }
  EXPECT_EQ(counted("net.ucx.segments"), 3u);
  EXPECT_THAT(asked, ::testing::UnorderedElementsAre(999, 1000, 300'000, 5'000'000));
  channel->close();
  drive_until([&] { return journal_.closed.size() == 2; });
  EXPECT_EQ(channel->unsent_bytes(), 0u);
}

TEST_F(UcxTransportTest, ReportsAPeerThatStopsResponding) {
  UcxOptions ucx = on_loopback();
  ucx.tls.heartbeat = std::chrono::milliseconds(50);
  ucx.tls.dead_after = std::chrono::milliseconds(300);
  start({}, ucx);
  OddPeer peer(*executor_, address_);
  peer.say(encode(peer.greeting()));
  drive_until([&] {
    peer.step();
    return peer.is_greeted();
  });
  peer.send(UcxTask::Kind::kHello, {peer.their_label(), 0}, {});
  drive_until([&] {
    peer.step();
    return peer.heard_hello() && journal_.accepted.size() == 1;
  });
  // No thread drives the peer from here on.
  drive_until([&] { return journal_.closed.size() == 1; });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("silent for 0.3 s"));
}

/// Ends the transport after each number of steps of a connecting peer. With UCX 1.13, two steps leave a reply
/// unsent that UCX must not cancel.
TEST_F(UcxTransportTest, EndsWhileAPeerConnectsThroughUcx) {
  std::vector<Thread> ends;  // at the same time: each takes a second, since the peer makes no more steps
  for (const bool introduces_itself : {false, true}) {
    for (int steps = 0; steps < 5; ++steps) {
      SCOPED_TRACE(::testing::Message()
                   << "introduces itself: " << introduces_itself << ", steps: " << steps);
      start({});
      auto peer = std::make_shared<OddPeer>(*executor_, address_);
      drive_until([&] {
        peer->step();
        return peer->is_greeted();
      });
      if (HasFatalFailure()) return;
      if (introduces_itself) peer->say(encode(peer->greeting()));
      peer->send(UcxTask::Kind::kHello, {peer->their_label(), 0}, {});
      for (int step = 0; step < steps; ++step) {
        peer->step();
        for (int poll = 0; poll < 20; ++poll) transport_->poll();
      }
      EXPECT_LE(journal_.accepted.size(), 1u);
      std::shared_ptr<Transport> transport = std::move(transport_);
      ends.push_back(executor_->spawn(
          "ends", [transport = std::move(transport), peer,
                   channels = std::exchange(journal_, {}).accepted]() mutable { transport.reset(); }));
    }
  }
}

TEST_F(UcxTransportTest, CutsOffAPeerThatSendsGarbageThroughUcxAndDropsUnaddressedMessages) {
  start({});
  OddPeer peer(*executor_, address_);
  peer.say(encode(peer.greeting()));
  drive_until([&] {
    peer.step();
    return peer.is_greeted();
  });
  peer.send(UcxTask::Kind::kHello, {peer.their_label(), 0}, {});
  drive_until([&] {
    peer.step();
    return peer.heard_hello() && journal_.accepted.size() == 1;
  });
  peer.send(UcxTask::Kind::kChunk, {peer.their_label() + 1, 0}, Bytes(100));
  peer.send(UcxTask::Kind::kSegment, {peer.their_label() + 1, 1}, Bytes(100'000));
  drive_until([&] {
    peer.step();
    return counted("net.ucx.dropped") == 2;
  });
  EXPECT_TRUE(journal_.closed.empty());
  peer.send(UcxTask::Kind::kChunk, {peer.their_label(), 0}, Bytes(100, std::byte{7}));
  drive_until([&] {
    peer.step();
    return journal_.closed.size() == 1;
  });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kInvalid);
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("is cut off"));
  EXPECT_TRUE(journal_.received.empty());
}

/// A peer dies between its offer of a segment and the fetch.
TEST_F(UcxTransportTest, FreesTheMemoryOfAFetchWhosePeerHasDied) {
  UcxWorker receiver(*executor_, on_loopback());
  auto sender = std::make_unique<UcxWorker>(*executor_, on_loopback());
  const auto send = [](UcxWorker& worker, UcxRoute& route, UcxTask::Kind kind, const Bytes& bytes) {
    auto task = std::make_unique<UcxTask>();
    task->kind = kind;
    task->segment = {bytes.data(), bytes.size(), nullptr};
    worker.send(route, task, true);
  };
  const Bytes bytes(1 << 20, std::byte{7});
  int hellos = 0;
  void* descriptor = nullptr;
  bool failed = false;
  const auto drive = [&](const std::function<bool()>& done) {
    for (const Deadline limit = executor_->deadline_in(std::chrono::seconds(20)); !done();) {
      ASSERT_FALSE(limit.passed(executor_->now()));
      for (UcxWorker* worker : {&receiver, sender.get()}) {
        if (worker == nullptr) continue;
        worker->progress();
        const UcxWorker::Events events = worker->take_events();
        failed |= !events.failed.empty();
        for (const UcxWorker::Arrival& arrival : events.arrivals) {
          hellos += arrival.kind == UcxTask::Kind::kHello ? 1 : 0;
          if (arrival.offer.descriptor != nullptr) descriptor = arrival.offer.descriptor;
        }
      }
    }
  };
  // One side after the other, as the transport connects.
  const auto there = sender->open_route(receiver.address());
  send(*sender, *there, UcxTask::Kind::kHello, {});
  ASSERT_NO_FATAL_FAILURE(drive([&] { return hellos == 1; }));
  const auto back = receiver.open_route(sender->address());
  send(receiver, *back, UcxTask::Kind::kHello, {});
  ASSERT_NO_FATAL_FAILURE(drive([&] { return hellos == 2; }));
  send(*sender, *there, UcxTask::Kind::kSegment, bytes);
  ASSERT_NO_FATAL_FAILURE(drive([&] { return descriptor != nullptr; }));
  sender.reset();
  ASSERT_NO_FATAL_FAILURE(drive([&] { return failed; }));
  auto task = std::make_unique<UcxTask>();
  task->kind = UcxTask::Kind::kFetch;
  task->into = allocate_buffer(bytes.size());
  const std::weak_ptr<const void> memory = task->into.owner;
  EXPECT_EQ(receiver.fetch(*back, descriptor, task), UcxWorker::Outcome::kFailed);
  task.reset();
  EXPECT_TRUE(memory.expired());
}

TEST_F(UcxTransportTest, RejectsAnAuthenticatedPeerWithAnInvalidUcxGreeting) {
  start({});
  OddPeer peer(*executor_, address_);
  peer.say(Bytes(50, std::byte{9}));
  drive_until([&] {
    peer.step();
    return journal_.refused.size() == 1;
  });
  EXPECT_EQ(journal_.refused.at(0).kind(), ErrorKind::kInvalid);

  OddPeer old(*executor_, address_);
  UcxGreeting greeting = old.greeting();
  greeting.minor = 1;  // a UCX version that does not promise compatibility with later ones
  old.say(encode(greeting));
  drive_until([&] {
    old.step();
    return journal_.refused.size() == 2;
  });
  EXPECT_EQ(journal_.refused.at(1).kind(), ErrorKind::kUnsupported);
  EXPECT_TRUE(journal_.accepted.empty());
}

TEST_F(UcxTransportTest, RejectsAnAuthenticatedPeerThatSendsNothing) {
  TransportOptions options;
  options.handshake_timeout = std::chrono::milliseconds(200);
  start(options);
  OddPeer peer(*executor_, address_);
  drive_until([&] {
    peer.step();
    return journal_.refused.size() == 1;
  });
  EXPECT_EQ(journal_.refused.at(0).kind(), ErrorKind::kTimedOut);
}

}  // namespace
}  // namespace torchspan::net::ucx_transport_test
