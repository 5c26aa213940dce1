#include "tests/conformance/transport_hosts.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/// Two hosts whose connection fails, most often silently. The hosts are two processes in separate network namespaces,
/// connected by a pair of virtual Ethernet devices; everything ends with the processes.
namespace torchspan::net::transport_hosts {
namespace {

constexpr const char* kNear = "10.77.0.1";
constexpr const char* kFar = "10.77.0.2";
/// TlsOptions::dead_after of both hosts, if a test sets no other.
constexpr Duration kDeadAfter = std::chrono::milliseconds(1200);
/// How long one host waits for a handshake, and the other, whose refusal must not come first. TCP sends the first packet
/// of a connection again after a second.
constexpr Duration kPatience = std::chrono::seconds(3), kLongPatience = std::chrono::seconds(60);
/// Begins a line of the far host about a connection that it refused.
const std::string kRefused = "refused: ";

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

/// The far host: echoes, reports when and why its channel ended, and serves one more.
[[noreturn]] void be_far_host(const Wire& wire, Duration patience, Duration dead_after) {
  if (::unshare(CLONE_NEWNET) != 0) {
    wire.write_line(std::string("no namespace: ") + std::strerror(errno));
    ::_exit(0);
  }
  wire.write_line("here");
  wire.read_line();
  const bool up =
      run("ip link set lo up") && run("ip addr add 10.77.0.2/24 dev far") && run("ip link set far up");
  const auto executor = make_executor();
  Listening far;
  far.echo = true;
  far.refused = [&wire](const Error& reason) { wire.write_line(kRefused + reason.what()); };
  TransportOptions options;
  options.handshake_timeout = patience;
  const auto transport = make_transport(*executor, far, dead_after, std::move(options));
  wire.write_line(up ? transport->listen(std::string("tls:") + kFar + ":0") : "no link");
  drive_until(*executor, *transport, [&] { return !far.closed.empty(); });
  wire.write_line(std::to_string(executor->now().time_since_epoch().count()));
  wire.write_line(far.closed.empty() ? "it did not end" : far.closed.at(0).what());
  // Another test may connect the cable again.
  drive_until(*executor, *transport, [&] { return far.closed.size() == 2; });
  ::_exit(0);
}

class TwoHosts : public ::testing::Test {
 protected:
  ~TwoHosts() override {
    if (far_ > 0) {
      ::kill(far_, SIGKILL);
      ::waitpid(far_, nullptr, 0);
    }
    if (home_ && ::setns(home_.get(), CLONE_NEWNET) != 0) ADD_FAILURE() << std::strerror(errno);
  }

  /// Empty, or the reason why two hosts cannot be simulated here.
  std::string connect_hosts(Duration far_patience = kPatience, Duration far_dead_after = kDeadAfter) {
    if (::geteuid() != 0) return "this user is not root, so it may make no network namespaces";
    if (!run("ip -V")) return "there is no program 'ip' (package iproute2)";
    int there[2], back[2];
    if (::pipe2(there, O_CLOEXEC) != 0 || ::pipe2(back, O_CLOEXEC) != 0) return std::strerror(errno);
    far_ = ::fork();
    if (far_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(there[1]);
      ::close(back[0]);
      be_far_host(Wire(there[0], back[1]), far_patience, far_dead_after);
    }
    ::close(there[0]);
    ::close(back[1]);
    wire_.emplace(back[0], there[1]);
    if (const std::string word = wire_->read_line(); word != "here") return word;
    home_.reset(::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    if (::unshare(CLONE_NEWNET) != 0) return std::string("no namespace: ") + std::strerror(errno);
    if (!run("ip link set lo up") ||
        !run("ip link add near type veth peer name far netns " + std::to_string(far_)) ||
        !run(std::string("ip addr add ") + kNear + "/24 dev near") || !run("ip link set near up")) {
      return "this system cannot create a pair of virtual Ethernet devices (veth)";
    }
    wire_->write_line("linked");
    address_ = wire_->read_line();
    return address_.starts_with("tls:") ? "" : "the far host has no network: " + address_;
  }

  /// Unplugs the cable, and checks that both sides detect it in time.
  void pull_cable_and_listen(bool busy) {
    const auto executor = make_executor();
    Listening near;
    const auto transport = make_transport(*executor, near, kDeadAfter);
    const auto channel = transport->connect(address_, Deadline::never());
    channel->send(Bytes(8), {});
    ASSERT_TRUE(
        drive_until(*executor, *transport, [&] { return near.messages == 1 || !near.closed.empty(); }));
    ASSERT_TRUE(near.closed.empty()) << near.closed.at(0).what();
    // Another peer on this host, which the cable does not affect.
    const auto kept = transport->connect(transport->listen("tls:127.0.0.1:0"), Deadline::never());
    const Buffer bulk = allocate_buffer(4 << 20);
    const Segment segment{bulk.data, bulk.size, bulk.owner};
    if (busy) {
      for (int i = 0; i < 64; ++i) channel->send(Bytes(8), std::span(&segment, 1));
      ASSERT_TRUE(drive_until(*executor, *transport, [&] { return near.messages >= 3; }));
    }
    ASSERT_TRUE(run("ip link set near down"));
    const TimePoint pulled = executor->now();
    ASSERT_TRUE(drive_until(*executor, *transport, [&] { return !near.closed.empty(); }));
    const Duration here = executor->now() - pulled;
    // A channel opens further connections for bulk; the cable may be pulled while the far host accepts one.
    std::string line = wire_->read_line();
    while (line.starts_with(kRefused)) line = wire_->read_line();
    ASSERT_THAT(line, ::testing::MatchesRegex("[0-9]+"));
    const TimePoint heard{Duration(std::stoll(line))};
    std::string there = wire_->read_line();
    while (there.starts_with(kRefused)) there = wire_->read_line();
    EXPECT_EQ(near.closed.at(0).kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(near.closed.at(0).message(), ::testing::HasSubstr("silent for 1.2 s"));
    EXPECT_THAT(there, ::testing::HasSubstr("disconnected"));
    EXPECT_THAT(there, ::testing::HasSubstr("silent for 1.2 s"));
    for (const Duration time : {here, heard - pulled}) {
      EXPECT_LT(time, std::chrono::seconds(10));
      EXPECT_GT(time, kDeadAfter / 2);
    }
    ASSERT_TRUE(run("ip link set near up"));
    const std::size_t before = near.messages;
    kept->send(Bytes(8), {});
    transport->connect(address_, Deadline::never())->send(Bytes(8), {});
    EXPECT_TRUE(drive_until(*executor, *transport, [&] { return near.messages == before + 2; }))
        << "one message arrives on this host, the other comes back from the far one";
    EXPECT_EQ(near.closed.size(), 1u);
  }

  /// From now on, one of the hosts sends no packet above `most` bytes; its system does not notice.
  bool lose_packets_above(int most, bool of_far_host) const {
    const std::string enter = of_far_host ? "nsenter --net=/proc/" + std::to_string(far_) + "/ns/net " : "";
    return run(enter + "tc qdisc add dev " + (of_far_host ? "far" : "near") +
               " root tbf rate 100mbit latency 50ms burst " + std::to_string(most));
  }
  /// Why a connection to the far host fails, which must happen soon after the time limit for handshakes.
  Error failure_of_dial(Duration limit) const {
    const auto executor = make_executor();
    Listening near;
    TransportOptions options;
    options.handshake_timeout = limit;
    const auto transport = make_transport(*executor, near, kDeadAfter, options);
    const TimePoint start = executor->now();
    const auto channel = transport->connect(address_, Deadline::never());
    channel->send(Bytes(8), {});
    if (!drive_until(*executor, *transport, [&] { return !near.closed.empty(); }))
      return Error(ErrorKind::kInvalid, "it did not fail");
    EXPECT_LT(executor->now() - start, limit + std::chrono::seconds(10));
    return near.closed.at(0);
  }

  std::optional<Wire> wire_;
  std::string address_;

 private:
  pid_t far_ = 0;
  Descriptor home_;
};

TEST_F(TwoHosts, BothReportAPulledCableWhenTheSilenceIsTooLongWhileIdle) {
  if (const std::string why = connect_hosts(); !why.empty()) GTEST_SKIP() << "no two hosts: " << why;
  pull_cable_and_listen(false);
}

TEST_F(TwoHosts, BothReportAPulledCableWhenTheSilenceIsTooLongDuringBulk) {
  if (const std::string why = connect_hosts(); !why.empty()) GTEST_SKIP() << "no two hosts: " << why;
  pull_cable_and_listen(true);
}

TEST_F(TwoHosts, StayConnectedWhileASlowLinkIsFullForLongerThanASilenceMayLast) {
  if (const std::string why = connect_hosts(); !why.empty()) GTEST_SKIP() << "no two hosts: " << why;
  if (!run("tc qdisc add dev near root tbf rate 20mbit burst 20kb latency 400ms"))
    GTEST_SKIP() << "this system has no queueing discipline tbf";
  const auto executor = make_executor();
  Listening near;
  const auto transport = make_transport(*executor, near, kDeadAfter);
  const auto channel = transport->connect(address_, Deadline::never());
  const Buffer bulk = allocate_buffer(3 << 20);
  const Segment segment{bulk.data, bulk.size, bulk.owner};
  const TimePoint start = executor->now();
  for (int i = 0; i < 2; ++i) channel->send(Bytes(8), std::span(&segment, 1));
  EXPECT_TRUE(drive_until(*executor, *transport, [&] { return near.messages == 2 || !near.closed.empty(); }));
  EXPECT_TRUE(near.closed.empty()) << near.closed.at(0).what();
  EXPECT_GT(executor->now() - start, 2 * kDeadAfter) << "the link is not slow";
}

TEST_F(TwoHosts, AreToldIfOnlySmallPacketsReachThePeer) {
  if (const std::string why = connect_hosts(); !why.empty()) GTEST_SKIP() << "no two hosts: " << why;
  if (!lose_packets_above(1200, false)) GTEST_SKIP() << "this system has no queueing discipline tbf";
  EXPECT_THAT(failure_of_dial(kLongPatience).message(), ::testing::HasSubstr("see its log"));
  // The packets are lost on this host, and its system knows it; the other host sees what a black hole is like.
  EXPECT_THAT(wire_->read_line(),
              ::testing::AllOf(::testing::HasSubstr("timed out"), ::testing::HasSubstr("MTU")));
}

TEST_F(TwoHosts, AreToldIfOnlySmallPacketsComeBack) {
  if (const std::string why = connect_hosts(kLongPatience, kLongPatience); !why.empty())
    GTEST_SKIP() << "no two hosts: " << why;
  if (!lose_packets_above(1200, true)) GTEST_SKIP() << "this system has no queueing discipline tbf";
  const Error error = failure_of_dial(kPatience);
  EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
  EXPECT_THAT(error.message(), ::testing::AllOf(::testing::HasSubstr(address_), ::testing::HasSubstr("MTU")));
}

TEST_F(TwoHosts, AreToldIfAConnectionWorksInOneDirectionOnly) {
  if (const std::string why = connect_hosts(kLongPatience, kLongPatience); !why.empty())
    GTEST_SKIP() << "no two hosts: " << why;
  // Address resolution still works in both directions.
  if (!lose_packets_above(50, true)) GTEST_SKIP() << "this system has no queueing discipline tbf";
  const Error error = failure_of_dial(kPatience);
  EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
  EXPECT_THAT(error.message(),
              ::testing::AllOf(::testing::HasSubstr(address_), ::testing::HasSubstr("firewall")));
}

}  // namespace
}  // namespace torchspan::net::transport_hosts
