#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <set>

#include <torchspan/core/bytes.h>

#include "net/api/sim.h"

/// Fault injection and the determinism of the simulated network; what it shares with real ones is in
/// tests/conformance.
namespace torchspan::net::sim_network_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Bytes text(std::string_view characters) {
  const BytesView view = std::as_bytes(std::span(characters));
  return {view.begin(), view.end()};
}
std::string text(BytesView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

SimPredicate says(const std::string& word) {
  return [word](const SimMessage& message) { return text(message.header) == word; };
}

/// A transport with a thread; records received messages and their times.
class Peer final : public Handler {
 public:
  Peer(SimExecutor& executor, SimNetwork& network, const std::string& name)
      : executor_(executor), transport_(network.make_transport(name, *this, {})) {
    transport_->listen("sim:" + name);
    thread_ = executor.spawn(name, [this] {
      while (!stopping_) {
        transport_->poll();
        transport_->wait(Deadline::never());
      }
    });
  }
  ~Peer() override {
    stopping_ = true;
    transport_->wake();
    thread_.join();
  }
  std::shared_ptr<Channel> connect(const std::string& name) {
    return transport_->connect("sim:" + name, Deadline::never());
  }

  void on_accepted(const std::shared_ptr<Channel>& channel) override { accepted.push_back(channel); }
  void on_message(const std::shared_ptr<Channel>&, Message message) override {
    heard.push_back(text(message.header));
    times.push_back(executor_.now());
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override { closed.push_back(reason); }

  std::vector<std::string> heard;
  std::vector<TimePoint> times;
  std::vector<Error> closed;
  std::vector<std::shared_ptr<Channel>> accepted;

 private:
  SimExecutor& executor_;
  std::unique_ptr<Transport> transport_;
  bool stopping_ = false;
  Thread thread_;
};

void say(Channel& channel, std::initializer_list<const char*> words) {
  for (const char* word : words) channel.send(text(word), {});
}

/// Peers "a" and "b" with a channel from a to b, in a simulation of the given seed.
struct World {
  SimExecutor& executor;
  SimNetwork network;
  Peer a, b;
  std::shared_ptr<Channel> channel;

  World(SimExecutor& simulated, SimNetwork::Options options)
      : executor(simulated),
        network(simulated, options),
        a(simulated, network, "a"),
        b(simulated, network, "b") {
    channel = a.connect("b");
    pass(milliseconds(1));
  }
  void pass(Duration time) { executor.sleep(time); }
};

void simulate(SimNetwork::Options options, const std::function<void(World&)>& body,
              std::uint64_t seed = std::random_device()()) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  SimExecutor executor(seed);
  executor.run([&] {
    World world(executor, options);
    body(world);
  });
}

TEST(SimNetwork, DeliversAfterItsLatency) {
  simulate({.latency = milliseconds(3)}, [](World& world) {
    world.pass(milliseconds(20));
    const TimePoint start = world.executor.now();
    say(*world.channel, {"one", "two"});
    world.pass(milliseconds(10));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "two"));
    for (const TimePoint time : world.b.times) EXPECT_EQ(time - start, milliseconds(3));
  });
}

TEST(SimNetwork, KeepsAChannelsOrderUnderJitter) {
  simulate({.jitter = milliseconds(5)}, [](World& world) {
    world.pass(milliseconds(50));
    std::vector<std::string> sent;
    std::vector<TimePoint> times;
    for (int i = 0; i < 200; ++i) {
      sent.push_back(std::to_string(i));
      times.push_back(world.executor.now());
      say(*world.channel, {sent.back().c_str()});
      world.pass(milliseconds(1));
    }
    world.pass(milliseconds(50));
    ASSERT_EQ(world.b.heard, sent);
    std::set<Duration> delays;
    for (std::size_t i = 0; i < times.size(); ++i) delays.insert(world.b.times[i] - times[i]);
    EXPECT_GT(delays.size(), 1u);
  });
}

TEST(SimNetwork, ReordersUnderJitterWhenAllowed) {
  simulate({.jitter = milliseconds(5), .reorder = true}, [](World& world) {
    world.pass(milliseconds(50));
    std::vector<std::string> sent;
    for (int i = 0; i < 200; ++i) {
      sent.push_back(std::to_string(i));
      say(*world.channel, {sent.back().c_str()});
    }
    world.pass(milliseconds(50));
    EXPECT_NE(world.b.heard, sent);
    EXPECT_THAT(world.b.heard, ::testing::UnorderedElementsAreArray(sent));
  });
}

TEST(SimNetwork, DropsAndDuplicatesByChanceAndCounts) {
  simulate({.drop = 0.2, .duplicate = 0.3}, [](World& world) {
    for (int i = 0; i < 1000; ++i) say(*world.channel, {"x"});
    world.pass(milliseconds(10));
    const auto counters = world.network.counters();
    EXPECT_EQ(counters.sent, 1000u);
    EXPECT_EQ(counters.delivered, world.b.heard.size());
    EXPECT_EQ(counters.sent - counters.dropped + counters.duplicated, counters.delivered);
    EXPECT_NEAR(static_cast<double>(counters.dropped), 200, 100);
    EXPECT_NEAR(static_cast<double>(counters.duplicated), 240, 100);
    EXPECT_EQ(world.channel->unsent_bytes(), 0u);
  });
}

TEST(SimNetwork, HoldsBlockedMessagesAndWhatFollowsThem) {
  simulate({}, [](World& world) {
    world.network.block(says("stop"));
    say(*world.channel, {"one", "stop", "two"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one"));
    world.network.unblock();
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "stop", "two"));
    say(*world.channel, {"stop"});
    world.pass(milliseconds(1));
    EXPECT_EQ(world.b.heard.back(), "stop");
  });
}

TEST(SimNetwork, LetsOthersOvertakeABlockedMessageWhenReorderingIsAllowed) {
  simulate({.reorder = true}, [](World& world) {
    world.network.block(says("stop"));
    say(*world.channel, {"one", "stop", "two"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "two"));
    world.network.unblock();
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "two", "stop"));
  });
}

TEST(SimNetwork, HoldsWhatFollowsTheFirstMatchOnItsChannelOnly) {
  simulate({}, [](World& world) {
    const auto other = world.a.connect("b");
    world.pass(milliseconds(1));
    world.network.block_after(says("last"));
    say(*world.channel, {"one", "last", "two"});
    say(*other, {"free"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "last", "free"));
    say(*world.b.accepted.at(0), {"back"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.a.heard, ElementsAre("back"));
    world.network.unblock();
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "last", "free", "two"));
  });
}

TEST(SimNetwork, DropsWhatAPredicateChooses) {
  simulate({}, [](World& world) {
    world.network.drop_if(says("lost"));
    say(*world.channel, {"one", "lost", "two"});
    world.pass(milliseconds(1));
    world.network.drop_if({});
    say(*world.channel, {"lost"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("one", "two", "lost"));
    EXPECT_EQ(world.network.counters().dropped, 1u);
  });
}

TEST(SimNetwork, DelaysWhatAPredicateChooses) {
  simulate({.latency = microseconds(10)}, [](World& world) {
    world.network.delay_if(says("late"), milliseconds(7));
    const TimePoint start = world.executor.now();
    say(*world.channel, {"early", "late", "behind"});
    world.pass(milliseconds(20));
    EXPECT_THAT(world.b.heard, ElementsAre("early", "late", "behind"));
    EXPECT_EQ(world.b.times.at(0) - start, microseconds(10));
    EXPECT_EQ(world.b.times.at(1) - start, milliseconds(7) + microseconds(10));
  });
}

TEST(SimNetwork, ShowsEveryMessageToTheObserver) {
  simulate({}, [](World& world) {
    std::vector<std::string> seen;
    world.network.observe([&](const SimMessage& message) {
      seen.push_back(std::to_string(message.number) + " " + message.from + ">" + message.to + " " +
                     text(message.header));
    });
    world.network.drop_if(says("lost"));
    say(*world.channel, {"one", "lost"});
    say(*world.b.accepted.at(0), {"back"});
    EXPECT_THAT(seen, ElementsAre("0 sim:a>sim:b one", "1 sim:a>sim:b lost", "2 sim:b>sim:a back"));
  });
}

TEST(SimNetwork, ReportsNothingOverACutLinkAndDeliversAfterItIsHealed) {
  simulate({}, [](World& world) {
    say(*world.channel, {"under way"});
    world.network.cut("b", "a");
    say(*world.channel, {"cut"});
    const auto second = world.a.connect("b");
    world.pass(milliseconds(100));
    EXPECT_THAT(world.b.heard, IsEmpty());
    EXPECT_THAT(world.a.closed, IsEmpty());
    world.network.heal("a", "b");
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("under way", "cut"));
    say(*second, {"second"});
    world.pass(milliseconds(1));
    EXPECT_EQ(world.b.heard.back(), "second");
  });
}

TEST(SimNetwork, StopsDialingOverACutLink) {
  simulate({}, [](World& world) {
    world.network.cut("a", "b");
    world.a.connect("b");
    world.pass(std::chrono::seconds(6));
    ASSERT_EQ(world.a.closed.size(), 1u);
    EXPECT_EQ(world.a.closed.at(0).kind(), ErrorKind::kTimedOut);
  });
}

TEST(SimNetwork, KillClosesChannelsOnBothEndsAndDropsMessagesInFlight) {
  simulate({}, [](World& world) {
    say(*world.b.accepted.at(0), {"before"});
    world.pass(milliseconds(1));
    say(*world.b.accepted.at(0), {"under way"});
    world.network.kill("b");
    say(*world.b.accepted.at(0), {"after"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.a.heard, ElementsAre("before"));
    ASSERT_EQ(world.a.closed.size(), 1u);
    EXPECT_EQ(world.a.closed.at(0).kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(world.a.closed.at(0).message(), HasSubstr("'sim:b' is gone"));
    ASSERT_EQ(world.b.closed.size(), 1u);
    EXPECT_THROW(say(*world.b.accepted.at(0), {"later"}), Error);
    EXPECT_THROW(say(*world.channel, {"later"}), Error);
    EXPECT_THROW(world.network.kill("b"), Error);

    world.a.connect("b");
    world.b.connect("a");
    world.pass(milliseconds(1));
    ASSERT_EQ(world.a.closed.size(), 2u);
    EXPECT_THAT(world.a.closed.at(1).message(), HasSubstr("no worker listens at 'sim:b'"));
    EXPECT_EQ(world.b.closed.size(), 2u);
    EXPECT_THAT(world.a.accepted, IsEmpty());
  });
}

TEST(SimNetwork, BreaksConnectionsThatCanBeDialedAgain) {
  simulate({}, [](World& world) {
    say(*world.channel, {"under way"});
    world.network.sever("b", "a");
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, IsEmpty());
    ASSERT_EQ(world.a.closed.size(), 1u);
    ASSERT_EQ(world.b.closed.size(), 1u);
    EXPECT_EQ(world.a.closed.at(0).kind(), ErrorKind::kDisconnected);
    EXPECT_THROW(say(*world.channel, {"later"}), Error);

    say(*world.a.connect("b"), {"again"});
    world.pass(milliseconds(1));
    EXPECT_THAT(world.b.heard, ElementsAre("again"));
  });
}

TEST(SimNetwork, AllowsAKilledNameToReturn) {
  simulate({}, [](World& world) {
    EXPECT_THROW(Peer(world.executor, world.network, "b"), Error) << "b is alive";
    world.network.kill("b");
    Peer again(world.executor, world.network, "b");
    say(*world.a.connect("b"), {"hello"});
    world.pass(milliseconds(1));
    EXPECT_THAT(again.heard, ElementsAre("hello"));
  });
}

TEST(SimNetwork, ReportsADeathOverACutLinkOnlyAfterItIsHealed) {
  simulate({}, [](World& world) {
    world.network.cut("a", "b");
    world.network.kill("b");
    world.pass(milliseconds(10));
    EXPECT_THAT(world.a.closed, IsEmpty());
    world.network.heal("a", "b");
    world.pass(milliseconds(1));
    EXPECT_EQ(world.a.closed.size(), 1u);
  });
}

TEST(SimNetwork, RepeatsTheRunOfASeedAndDiffersForAnother) {
  const auto history = [](std::uint64_t seed) {
    std::vector<std::string> events;
    simulate(
        {.jitter = milliseconds(2), .reorder = true, .drop = 0.1, .duplicate = 0.1},
        [&](World& world) {
          Peer c(world.executor, world.network, "c");
          const auto from_c = c.connect("b");
          for (int i = 0; i < 100; ++i) {
            say(*world.channel, {("a" + std::to_string(i)).c_str()});
            say(*from_c, {("c" + std::to_string(i)).c_str()});
            if (i % 10 == 0) world.pass(microseconds(300));
          }
          world.pass(milliseconds(50));
          for (std::size_t i = 0; i < world.b.heard.size(); ++i) {
            events.push_back(world.b.heard[i] + "@" +
                             std::to_string(world.b.times[i].time_since_epoch().count()));
          }
          events.push_back(std::to_string(world.executor.steps()));
        },
        seed);
    return events;
  };
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  EXPECT_EQ(history(seed), history(seed));
  EXPECT_NE(history(seed), history(seed + 1));
}

TEST(SimNetwork, ListensAtItsOwnNameOnly) {
  simulate({}, [](World& world) {
    Peer c(world.executor, world.network, "c");
    Handler& handler = c;
    const auto transport = world.network.make_transport("d", handler, {});
    EXPECT_THROW(transport->listen("sim:a"), Error);
    EXPECT_EQ(transport->listen("sim:d"), "sim:d");
  });
}

}  // namespace
}  // namespace torchspan::net::sim_network_test
