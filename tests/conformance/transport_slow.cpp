#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <optional>
#include <ostream>
#include <sys/wait.h>

#include "tests/conformance/transport_hosts.h"
#include "tests/support/slow_network.h"

/// Encrypted messages between two hosts whose link is slow or loses packets. A process in user space is the link, so the
/// suite needs no `netem`.
namespace torchspan::net::transport_slow {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::LinkQuality;
using testing::SlowNetwork;
using transport_hosts::drive_until;
using transport_hosts::Listening;
using transport_hosts::make_transport;
using transport_hosts::Wire;

/// TlsOptions::dead_after of both hosts. A packet that is lost three times in a row arrives within it.
constexpr Duration kDeadAfter = seconds(2);

/// Sum of all bytes of a message, each multiplied by its place: parts that change places change it.
std::uint64_t sum_of(const std::vector<Buffer>& segments) {
  std::uint64_t sum = 0, place = 0;
  for (const Buffer& segment : segments) {
    for (std::size_t i = 0; i < segment.size; ++i)
      sum += ++place * static_cast<std::uint64_t>(segment.data[i]);
  }
  return sum;
}

/// Answers each message with its sum, and reports when and why a channel ended.
class Summing final : public Listening {
 public:
  Summing(const Executor& executor, const Wire& wire) : executor_(executor), wire_(wire) {}
  void on_message(const std::shared_ptr<Channel>& channel, Message message) override {
    const std::uint64_t sum = sum_of(message.segments);
    channel->send(std::as_bytes(std::span(&sum, 1)), {});
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override {
    wire_.write_line(std::to_string(executor_.now().time_since_epoch().count()));
    wire_.write_line(reason.what());
  }

 private:
  const Executor& executor_;
  const Wire& wire_;
};

class Summed final : public Listening {
 public:
  void on_message(const std::shared_ptr<Channel>&, Message message) override {
    std::uint64_t sum = 0;
    if (message.header.size() == sizeof sum) std::memcpy(&sum, message.header.data(), sizeof sum);
    sums.push_back(sum);
  }
  std::vector<std::uint64_t> sums;
};

Descriptor network_of(pid_t process) {
  return Descriptor(::open(("/proc/" + std::to_string(process) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC));
}

[[noreturn]] void be_far_host(const SlowNetwork& network, const Wire& wire) {
  const Descriptor place = network_of(network.far.pid());
  if (!place || ::setns(place.get(), CLONE_NEWNET) != 0) ::_exit(1);
  const auto executor = make_executor();
  Summing far(*executor, wire);
  const auto transport = make_transport(*executor, far, kDeadAfter);
  wire.write_line(transport->listen(std::string("tls:") + SlowNetwork::kFar + ":0"));
  for (;;) {
    if (!transport->poll()) transport->wait(Deadline::never());
  }
}

/// This process is on the near host.
class SlowHosts : public ::testing::Test {
 protected:
  ~SlowHosts() override {
    if (far_ > 0) {
      ::kill(far_, SIGKILL);
      ::waitpid(far_, nullptr, 0);
    }
    if (home_ && ::setns(home_.get(), CLONE_NEWNET) != 0) ADD_FAILURE() << std::strerror(errno);
  }

  /// Empty, or the reason why two hosts cannot be simulated here.
  std::string connect_hosts(const LinkQuality& quality) {
    network_.emplace(quality);
    if (!network_->trouble().empty()) return network_->trouble();
    int there[2], back[2];
    if (::pipe2(there, O_CLOEXEC) != 0 || ::pipe2(back, O_CLOEXEC) != 0) return std::strerror(errno);
    far_ = ::fork();
    if (far_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(there[1]);
      ::close(back[0]);
      be_far_host(*network_, Wire(there[0], back[1]));
    }
    ::close(there[0]);
    ::close(back[1]);
    wire_.emplace(back[0], there[1]);
    address_ = wire_->read_line();
    if (!address_.starts_with("tls:")) return "the far host cannot listen";
    home_ = network_of(::getpid());
    const Descriptor place = network_of(network_->near.pid());
    if (!place || ::setns(place.get(), CLONE_NEWNET) != 0) return std::strerror(errno);
    transport_ = make_transport(*executor_, near_, kDeadAfter);
    channel_ = transport_->connect(address_, Deadline::never());
    return "";
  }

  bool drive_until_answered(std::size_t answers) {
    drive_until(*executor_, *transport_,
                [&] { return near_.sums.size() >= answers || !near_.closed.empty(); });
    if (!near_.closed.empty()) ADD_FAILURE() << near_.closed.at(0).what();
    EXPECT_GE(near_.sums.size(), answers) << "within 30 s";
    return near_.closed.empty() && near_.sums.size() >= answers;
  }

  /// Sends small messages one after the other; each needs a round trip.
  void exchange_small_messages() {
    channel_->send(Bytes(8), {});
    ASSERT_TRUE(drive_until_answered(1)) << "the first one waits for the handshake";
    for (std::size_t i = 2; i <= 6; ++i) {
      const TimePoint start = executor_->now();
      channel_->send(Bytes(8), {});
      ASSERT_TRUE(drive_until_answered(i));
      EXPECT_GE(executor_->now() - start, 2 * network_->quality.delay)
          << "the link is faster than it should be";
    }
  }

  /// Sends messages of 1 MiB, large enough for several lanes, all at once.
  void send_large_messages(std::size_t count) {
    const Buffer large = allocate_buffer(1 << 20);
    for (std::size_t i = 0; i < large.size; ++i) large.data[i] = static_cast<std::byte>(i * 7 + i / 256);
    const Segment segment{large.data, large.size, large.owner};
    const std::size_t before = near_.sums.size();
    const TimePoint start = executor_->now();
    for (std::size_t i = 0; i < count; ++i) channel_->send(Bytes(8), std::span(&segment, 1));
    ASSERT_TRUE(drive_until_answered(before + count));
    if (network_->quality.bits_per_second > 0) {
      const double least = static_cast<double>(8 * count * large.size) / network_->quality.bits_per_second;
      EXPECT_GE(to_seconds(executor_->now() - start), least) << "the link is faster than it should be";
    }
    const std::uint64_t expected = sum_of({large});
    for (std::size_t i = before; i < before + count; ++i) EXPECT_EQ(near_.sums[i], expected);
  }

  void drive_for(Duration time) {
    const Deadline end = executor_->deadline_in(time);
    drive_until(*executor_, *transport_,
                [&] { return end.passed(executor_->now()) || !near_.closed.empty(); });
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  std::optional<SlowNetwork> network_;
  std::optional<Wire> wire_;
  std::string address_;
  Summed near_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Channel> channel_;

 private:
  pid_t far_ = 0;
  Descriptor home_;
};

struct NamedLink {
  const char* name;
  LinkQuality quality;
  friend std::ostream& operator<<(std::ostream& out, const NamedLink& link) { return out << link.name; }
};

class SlowLinks : public SlowHosts, public ::testing::WithParamInterface<NamedLink> {};

TEST_P(SlowLinks, CarryAllMessagesWithoutAFalseDeath) {
  if (const std::string why = connect_hosts(GetParam().quality); !why.empty())
    GTEST_SKIP() << "no two hosts: " << why;
  exchange_small_messages();
  if (HasFatalFailure()) return;
  send_large_messages(2);
  EXPECT_TRUE(near_.closed.empty());
}

INSTANTIATE_TEST_SUITE_P(
    Transport, SlowLinks,
    ::testing::Values(NamedLink{"Delay1ms", {.delay = milliseconds(1)}},
                      NamedLink{"Delay10ms", {.delay = milliseconds(10)}},
                      NamedLink{"Delay50ms", {.delay = milliseconds(50)}},
                      NamedLink{"Loss01Percent", {.delay = milliseconds(1), .loss = 0.001}},
                      NamedLink{"Loss1Percent", {.delay = milliseconds(5), .loss = 0.01}},
                      NamedLink{"Rate100Mbit", {.delay = milliseconds(1), .bits_per_second = 1e8}},
                      NamedLink{"Rate20MbitDelay50ms", {.delay = milliseconds(50), .bits_per_second = 2e7}}),
    [](const auto& row) { return std::string(row.param.name); });

TEST_F(SlowHosts, AreNotTakenForDeadWhileTheyAreIdleOnALinkThatLosesPackets) {
  if (const std::string why = connect_hosts({.delay = milliseconds(20), .loss = 0.01}); !why.empty())
    GTEST_SKIP() << "no two hosts: " << why;
  channel_->send(Bytes(8), {});
  ASSERT_TRUE(drive_until_answered(1));
  drive_for(kDeadAfter + milliseconds(700));
  ASSERT_TRUE(near_.closed.empty()) << near_.closed.at(0).what();
  channel_->send(Bytes(8), {});
  EXPECT_TRUE(drive_until_answered(2));
}

TEST_F(SlowHosts, BothReportACutLinkDuringBulkWhenTheSilenceIsTooLong) {
  if (const std::string why = connect_hosts({.delay = milliseconds(50), .bits_per_second = 1e8});
      !why.empty())
    GTEST_SKIP() << "no two hosts: " << why;
  send_large_messages(1);
  if (HasFatalFailure()) return;
  const Buffer large = allocate_buffer(64 << 20);
  const Segment segment{large.data, large.size, large.owner};
  channel_->send(Bytes(8), std::span(&segment, 1));
  drive_for(milliseconds(300));
  ASSERT_TRUE(near_.closed.empty()) << near_.closed.at(0).what();
  const TimePoint cut = executor_->now();
  network_->set_cut(true);
  ASSERT_TRUE(drive_until(*executor_, *transport_, [&] { return !near_.closed.empty(); }));
  const Duration here = executor_->now() - cut;
  const TimePoint heard{Duration(std::stoll(wire_->read_line()))};
  const std::string there = wire_->read_line();
  EXPECT_EQ(near_.closed.at(0).kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(near_.closed.at(0).message(), ::testing::HasSubstr("silent for 2.0 s"));
  EXPECT_THAT(there, ::testing::HasSubstr("silent for 2.0 s"));
  for (const Duration time : {here, heard - cut}) {
    EXPECT_LT(time, seconds(10));
    EXPECT_GT(time, kDeadAfter / 2);
  }
  network_->set_cut(false);
  near_.closed.clear();
  channel_ = transport_->connect(address_, Deadline::never());
  const std::size_t before = near_.sums.size();
  channel_->send(Bytes(8), {});
  EXPECT_TRUE(drive_until_answered(before + 1)) << "a new connection works";
}

}  // namespace
}  // namespace torchspan::net::transport_slow
