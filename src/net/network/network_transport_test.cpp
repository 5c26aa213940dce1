#include "net/network/network_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <optional>

#include "net/api/network.h"
#include "tests/support/processes.h"

/// What only the transport of several hosts has: which way it goes to a peer, and one sleep for both ways.
/// Everything else is in tests/conformance.
namespace torchspan::net::network_transport_test {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

constexpr Duration kPatience = std::chrono::seconds(30);

/// A transport that the test drives; with `echo`, it sends received headers back.
class Side final : public Handler {
 public:
  Side(Executor& executor, const std::string& mark) : executor_(executor) {
    TransportOptions options;
    options.secret = Secret::from_bytes(Bytes(32, std::byte{'k'}));
    transport = make_marked_network_transport(executor, *this, std::move(options), {.host_mark = mark});
  }
  void on_accepted(const std::shared_ptr<Channel>& channel) override { callers.push_back(channel->peer()); }
  void on_message(const std::shared_ptr<Channel>& channel, Message message) override {
    ++heard[channel->peer()];
    if (echo) channel->send(message.header, {});
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override { ends.push_back(reason); }

  /// Sleeps without a time limit between two polls, so that a missed wake-up makes the test fail.
  bool drive_until(const std::function<bool()>& happened) {
    const Deadline deadline = executor_.deadline_in(kPatience);
    while (!happened()) {
      if (deadline.passed(executor_.now())) return false;
      if (!transport->poll()) transport->wait(deadline);
    }
    return true;
  }

  bool echo = false;
  std::vector<std::string> callers;
  std::map<std::string, int> heard;
  std::vector<Error> ends;
  std::unique_ptr<Transport> transport;

 private:
  Executor& executor_;
};

/// A side with a thread that drives it; it sends everything back.
class Echo {
 public:
  Echo(Executor& executor, const std::string& mark, const std::string& listen) : side_(executor, mark) {
    side_.echo = true;
    address = side_.transport->listen(listen);
    thread_ = executor.spawn("echo", [this] {
      while (!stop_) {
        if (!side_.transport->poll()) side_.transport->wait(Deadline::never());
      }
    });
  }
  ~Echo() {
    stop_ = true;
    side_.transport->wake();
    thread_.join();
  }
  std::string address;

 private:
  Side side_;
  std::atomic<bool> stop_{false};
  Thread thread_;
};

class NetworkTransportTest : public ::testing::Test {
 protected:
  std::string both(const std::string& name) const {
    return "unix:" + folder_.path() + "/" + name + ",tls:127.0.0.1:0";
  }
  const torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<Executor> executor_ = make_executor();
};

TEST(NetworkPlaceTest, ReadsWhatItWrites) {
  for (const std::string text :
       {"unix:/a/b@mark,tls:10.0.0.1:5", "unix:/a/b,tls:[::1]:0", "unix:/a/b@mark", "tls:node3:29500",
        "ucx:node3:1", "unix:/a@m,ucx:10.0.0.1:5", "unix:/odd,tls:name/x@m,tls:10.0.0.1:5"}) {
    EXPECT_EQ(parse_network_place(text).text(), text);
  }
  const NetworkPlace place = parse_network_place("unix:/home/a@b/sock@mark,tls:10.0.0.1:5");
  EXPECT_EQ(place.near, "unix:/home/a@b/sock");
  EXPECT_EQ(place.mark, "mark");
  EXPECT_EQ(place.far, "tls:10.0.0.1:5");
  EXPECT_EQ(parse_network_place("unix:/home/a@b/sock").mark, "");
}

TEST(NetworkPlaceTest, RefusesOtherKindsOfAddresses) {
  for (const std::string text : {"", "tcp:127.0.0.1:5", "/a/b", "sim:worker0"}) {
    EXPECT_THROW(parse_network_place(text), Error) << text;
  }
}

TEST_F(NetworkTransportTest, AdvertisesBothAddressesAndTheMark) {
  Side side(*executor_, "here");
  EXPECT_THAT(side.transport->listen(both("a")), MatchesRegex("unix:/.*/a@here,tls:127\\.0\\.0\\.1:[1-9].*"));
  EXPECT_THAT(side.transport->listen("tls:127.0.0.1:0"), MatchesRegex("tls:127\\.0\\.0\\.1:[1-9].*"));
  EXPECT_THROW(side.transport->listen("tcp:127.0.0.1:0"), Error);
}

TEST_F(NetworkTransportTest, UsesSharedMemoryOnOneHostAndTlsBetweenTwo) {
  const Echo near(*executor_, "here", both("near")), far(*executor_, "there", both("far"));
  Side side(*executor_, "here");
  const auto to_near = side.transport->connect(near.address, Deadline::never());
  const auto to_far = side.transport->connect(far.address, Deadline::never());
  EXPECT_THAT(to_near->peer(), StartsWith("unix:"));
  EXPECT_THAT(to_far->peer(), StartsWith("tls:"));
  to_near->send(Bytes(8), {});
  to_far->send(Bytes(8), {});
  EXPECT_TRUE(side.drive_until([&] { return side.heard.size() == 2; }));
}

TEST_F(NetworkTransportTest, UsesTlsForAPeerWhoseSocketIsNotVisibleHere) {
  const Echo echo(*executor_, "here", both("hidden"));
  std::filesystem::rename(folder_.path() + "/hidden", folder_.path() + "/elsewhere");
  Side side(*executor_, "here");
  const auto channel = side.transport->connect(echo.address, Deadline::never());
  EXPECT_THAT(channel->peer(), StartsWith("tls:"));
  channel->send(Bytes(8), {});
  EXPECT_TRUE(side.drive_until([&] { return side.heard.size() == 1; }));
}

TEST_F(NetworkTransportTest, RepliesOverBothTransportsEndTheWait) {
  const Echo near(*executor_, "here", both("near")), far(*executor_, "there", both("far"));
  Side side(*executor_, "here");
  const auto to_near = side.transport->connect(near.address, Deadline::never());
  const auto to_far = side.transport->connect(far.address, Deadline::never());
  for (int i = 1; i <= 200; ++i) {
    Channel& to = i % 3 == 0 ? *to_far : *to_near;
    const int before = side.heard[to.peer()];
    to.send(Bytes(8), {});
    ASSERT_TRUE(side.drive_until([&] { return side.heard[to.peer()] == before + 1; })) << "message " << i;
  }
}

TEST_F(NetworkTransportTest, ConnectionsOverBothTransportsEndTheWait) {
  Side side(*executor_, "here");
  const std::string address = side.transport->listen(both("listener"));
  for (const std::string mark : {"here", "there"}) {
    Side caller(*executor_, mark);
    const auto channel = caller.transport->connect(address, Deadline::never());
    channel->send(Bytes(8), {});
    std::atomic<bool> done{false};
    Thread driver = executor_->spawn("caller", [&] {
      while (!done) {
        if (!caller.transport->poll()) caller.transport->wait(Deadline::never());
      }
    });
    const std::size_t before = side.heard.size();
    EXPECT_TRUE(side.drive_until([&] { return side.heard.size() == before + 1; })) << mark;
    done = true;
    caller.transport->wake();
    driver.join();
  }
  EXPECT_EQ(side.callers.size(), 2u);
}

TEST_F(NetworkTransportTest, WakeEndsTheWaitOrTheNextOne) {
  Side side(*executor_, "here");
  side.transport->listen(both("listener"));
  while (side.transport->poll()) {
  }
  const Deadline deadline = executor_->deadline_in(kPatience);
  side.transport->wake();
  side.transport->wait(deadline);
  Thread other = executor_->spawn("waker", [&] { side.transport->wake(); });
  side.transport->wait(deadline);
  other.join();
  EXPECT_FALSE(deadline.passed(executor_->now()));
}

TEST_F(NetworkTransportTest, ADialFromAnotherThreadEndsTheSleep) {
  Side side(*executor_, "here");
  while (side.transport->poll()) {
  }
  for (const std::string& unreachable :
       {std::string("tls:127.0.0.1:1"), "unix:" + folder_.path() + "/unreachable@here"}) {
    const std::size_t before = side.ends.size();
    std::shared_ptr<Channel> channel;
    Thread other = executor_->spawn(
        "dialer", [&] { channel = side.transport->connect(unreachable, executor_->deadline_in(kPatience)); });
    EXPECT_TRUE(side.drive_until([&] { return side.ends.size() == before + 1; })) << unreachable;
    other.join();
    EXPECT_EQ(side.ends.back().kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(side.ends.back().message(), HasSubstr(channel->peer()));
  }
}

TEST(RouteTest, IsLoopbackForThisHost) {
  EXPECT_EQ(route_to("127.0.0.1"), "127.0.0.1");
  EXPECT_TRUE(is_loopback_host(route_to("localhost"))) << route_to("localhost");
}

TEST(RouteTest, ReportsAnUnknownHostName) {
  try {
    route_to("no-such-host.invalid");
    FAIL() << "found a way to nowhere";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("the host name 'no-such-host.invalid' is not known here"));
    EXPECT_THAT(error.message(), Not(HasSubstr(":9")));
  }
}

TEST(RouteTest, AdvertisesAnotherHostThanItListensAt) {
  EXPECT_EQ(with_far_host("unix:/a@m,tls:0.0.0.0:77", "10.0.0.1"), "unix:/a@m,tls:10.0.0.1:77");
  EXPECT_EQ(with_far_host("tls:[::]:77", "2001:db8::1"), "tls:[2001:db8::1]:77");
  EXPECT_EQ(with_far_host("unix:/a@m", "10.0.0.1"), "unix:/a@m");
  EXPECT_TRUE(is_any_host("0.0.0.0") && is_any_host("::") && !is_any_host("10.0.0.1"));
  EXPECT_TRUE(is_loopback_host("127.0.1.1") && is_loopback_host("localhost") &&
              !is_loopback_host("10.0.0.1"));
}

}  // namespace
}  // namespace torchspan::net::network_transport_test
