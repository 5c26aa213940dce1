#include <algorithm>
#include <atomic>
#include <gmock/gmock.h>
#include <map>

#include "tests/conformance/transport_node.h"

/// What a transport guarantees for messages: whole, once, in order, unchanged.
namespace torchspan::net::conformance::transport_traffic {
namespace {

/// Two nodes with a channel between them.
struct Pair {
  Pair(World& world, Node::Options dial, Node::Options listen)
      : listener(world, "listener", std::move(listen)), dialer(world, "dialer", std::move(dial)) {
    channel = dialer.connect(listener.listen());
  }
  explicit Pair(World& world) : Pair(world, {}, {}) {}

  Node listener;
  Node dialer;
  std::shared_ptr<Channel> channel;
};

TEST_P(TransportConformance, DeliversMessagesInOrderFromBeforeTheHandshakeOn) {
  in_world([](World& world) {
    Pair pair(world);
    for (std::uint64_t i = 0; i < 1000; ++i) send(*pair.channel, numbered(i));
    pair.listener.wait_for_messages(1000);
    const auto parcels = pair.listener.journal().parcels();
    ASSERT_EQ(parcels.size(), 1000u);
    for (std::uint64_t i = 0; i < 1000; ++i) EXPECT_EQ(number_of(parcels[i]), i);
  });
}

TEST_P(TransportConformance, DeliversEveryShapeUnchangedInBothDirections) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  in_world([&](World& world) {
    std::mt19937 random(seed);
    Pair pair(world);
    const auto back = pair.listener.wait_for_caller();
    std::vector<Parcel> there, home;
    for (int i = 0; i < 200; ++i) {
      send(*pair.channel, there.emplace_back(random_parcel(random)));
      send(*back, home.emplace_back(random_parcel(random)));
    }
    pair.listener.wait_for_messages(there.size());
    pair.dialer.wait_for_messages(home.size());
    EXPECT_EQ(pair.listener.journal().parcels(), there);
    EXPECT_EQ(pair.dialer.journal().parcels(), home);
  });
}

TEST_P(TransportConformance, DeliversEmptyMessagesAndEmptySegments) {
  in_world([](World& world) {
    Pair pair(world);
    const std::vector<Parcel> sent = {
        {{}, {}},
        {{}, {{}}},
        {{}, {{}, {}, {}}},
        {bytes_of("header"), {{}, bytes_of("one"), {}, {}, bytes_of("two"), {}}},
        {{}, {}},
        {bytes_of("header only"), {}},
        {{}, {bytes_of("segment only")}},
    };
    for (const Parcel& parcel : sent) send(*pair.channel, parcel);
    pair.listener.wait_for_messages(sent.size());
    EXPECT_EQ(pair.listener.journal().parcels(), sent);
  });
}

TEST_P(TransportConformance, DeliversThousandsOfSegmentsInOneMessage) {
  in_world([](World& world) {
    Pair pair(world);
    Parcel parcel{bytes_of("many"), {}};
    for (std::size_t i = 0; i < 5000; ++i) parcel.segments.push_back(pattern(i % 7 * 11, i));
    send(*pair.channel, parcel);
    send(*pair.channel, numbered(1));
    pair.listener.wait_for_messages(2);
    EXPECT_EQ(pair.listener.journal().received.at(0).parcel, parcel);
    EXPECT_EQ(pair.listener.journal().received.at(1).parcel, numbered(1));
  });
}

TEST_P(TransportConformance, DeliversHugeSegmentsAndHeaders) {
  // More than a transport sends ahead, which is 16 MiB; and more than TLS holds of a message whose parts come over
  // several connections.
  const std::size_t huge = std::size_t{GetParam().name == "Secret" ? 64u : 20u} << 20;
  in_world([huge](World& world) {
    Pair pair(world);
    const Parcel parcel{pattern(3'000'001, 1), {pattern(huge, 2), {}, pattern(5'000'003, 3)}};
    send(*pair.channel, parcel);
    pair.listener.wait_for_messages(1);
    EXPECT_TRUE(pair.listener.take_parcels().at(0) == parcel);
  });
}

TEST_P(TransportConformance, DeliversBulkInBothDirectionsAtOnce) {
  in_world([](World& world) {
    Pair pair(world);
    const auto back = pair.listener.wait_for_caller();
    // Three exceed all that a transport sends ahead: 16 MiB.
    const Parcel there{bytes_of("there"), {pattern(6 << 20, 4)}},
        home{bytes_of("home"), {pattern(6 << 20, 5)}};
    for (int i = 0; i < 3; ++i) {
      send(*pair.channel, there);
      send(*back, home);
    }
    pair.listener.wait_for_messages(3);
    pair.dialer.wait_for_messages(3);
    EXPECT_TRUE(pair.listener.take_parcels() == std::vector<Parcel>(3, there));
    EXPECT_TRUE(pair.dialer.take_parcels() == std::vector<Parcel>(3, home));
  });
}

TEST_P(TransportConformance, DeliversManySmallMessagesInBothDirectionsAtOnce) {
  in_world([](World& world) {
    constexpr std::uint64_t kMany = 20'000;
    Pair pair(world);
    const auto back = pair.listener.wait_for_caller();
    Thread other = world.executor().spawn("sender", [&] {
      for (std::uint64_t i = 0; i < kMany; ++i) send(*back, numbered(i));
    });
    for (std::uint64_t i = 0; i < kMany; ++i) send(*pair.channel, numbered(i));
    other.join();
    for (Node* node : {&pair.listener, &pair.dialer}) {
      node->wait_for_messages(kMany);
      const auto parcels = node->journal().parcels();
      for (std::uint64_t i = 0; i < kMany; ++i) ASSERT_EQ(number_of(parcels[i]), i);
    }
  });
}

TEST_P(TransportConformance, KeepsEverySendersOrderWhenSeveralThreadsSend) {
  in_world([](World& world) {
    constexpr std::uint64_t kThreads = 4, kEach = 500;
    Pair pair(world);
    std::vector<Thread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t) {
      threads.push_back(world.executor().spawn("sender", [&, t] {
        for (std::uint64_t i = 0; i < kEach; ++i) {
          Parcel parcel = numbered(t << 32 | i);
          parcel.segments.push_back(pattern(i % 50 * 100, t << 32 | i));
          send(*pair.channel, parcel);
          if (i % 16 == 0) world.executor().yield();
        }
      }));
    }
    for (Thread& thread : threads) thread.join();
    pair.listener.wait_for_messages(kThreads * kEach);
    std::map<std::uint64_t, std::uint64_t> next;
    for (const Parcel& parcel : pair.listener.journal().parcels()) {
      const std::uint64_t number = number_of(parcel), index = number & 0xffffffff;
      ASSERT_EQ(index, next[number >> 32]++);
      ASSERT_EQ(parcel.segments.at(0), pattern(index % 50 * 100, number));
    }
    EXPECT_EQ(pair.listener.journal().received.size(), kThreads * kEach);
  });
}

TEST_P(TransportConformance, LetsTheCallerOverwriteBorrowedBytesAtOnce) {
  in_world([](World& world) {
    Node::Options not_reading;
    not_reading.drive = false;
    Pair pair(world, {}, not_reading);
    std::vector<Parcel> sent;
    for (std::uint64_t i = 0; i < 40; ++i) {
      Bytes header = pattern(100, i), small = pattern(900, i + 1000), large = pattern(300'000, i + 2000);
      sent.push_back({header, {small, large}});
      const Segment segments[] = {{small.data(), small.size(), nullptr},
                                  {large.data(), large.size(), nullptr}};
      pair.channel->send(header, segments);
      for (Bytes* bytes : {&header, &small, &large}) std::ranges::fill(*bytes, std::byte{0xee});
    }
    pair.listener.drive();
    pair.listener.wait_for_messages(sent.size());
    EXPECT_TRUE(pair.listener.journal().parcels() == sent);
  });
}

TEST_P(TransportConformance, ReleasesKeptBytesOnceTheyAreSent) {
  in_world([](World& world) {
    Node::Options not_reading;
    not_reading.drive = false;
    Pair pair(world, {}, not_reading);
    std::vector<std::weak_ptr<const Bytes>> watched;
    std::vector<Parcel> sent;
    for (std::uint64_t i = 0; i < 20; ++i) {
      const auto bytes = std::make_shared<const Bytes>(pattern(200'000, i));
      watched.push_back(bytes);
      sent.push_back({{}, {*bytes}});
      const Segment segment{bytes->data(), bytes->size(), bytes};
      pair.channel->send({}, std::span(&segment, 1));
    }
    pair.listener.drive();
    pair.listener.wait_for_messages(sent.size());
    EXPECT_TRUE(pair.listener.journal().parcels() == sent);
    pair.channel->close();
    pair.dialer.wait_for_end(pair.channel);
    for (const auto& bytes : watched) EXPECT_TRUE(bytes.expired());
  });
}

TEST_P(TransportConformance, ReceivesEverySegmentThroughTheAllocator) {
  in_world([](World& world) {
    std::vector<std::size_t> asked;
    Node::Options listen;
    listen.transport.allocator = [&](std::size_t size) {
      asked.push_back(size);
      return allocate_buffer(size);
    };
    Pair pair(world, {}, listen);
    send(*pair.channel, {bytes_of("header"), {Bytes(10), {}, Bytes(100'000)}});
    pair.listener.wait_for_messages(1);
    pair.listener.stop();
    EXPECT_THAT(asked, ::testing::ElementsAre(10, 0, 100'000));
  });
}

TEST_P(TransportConformance, LetsTheAcceptingSideSendFirst) {
  in_world([](World& world) {
    Node::Options greets;
    greets.on_accepted = [](const std::shared_ptr<Channel>& channel) { send(*channel, numbered(7)); };
    Pair pair(world, {}, greets);
    pair.dialer.wait_for_messages(1);
    EXPECT_EQ(number_of(pair.dialer.journal().parcels().at(0)), 7u);
  });
}

TEST_P(TransportConformance, NeverCallsBackInsideSendNotEvenInsideACallback) {
  in_world([](World& world) {
    constexpr std::uint64_t kRounds = 2000;
    // The nodes fail the test if a callback comes from anywhere but their poll(), or inside another callback.
    Node::Options bounce;
    bounce.on_message = [](const std::shared_ptr<Channel>& channel, const Message& message) {
      const std::uint64_t number = number_of(parcel_of(message));
      if (number < kRounds) send(*channel, numbered(number + 1));
    };
    Pair pair(world, bounce, bounce);
    send(*pair.channel, numbered(0));
    pair.listener.wait_for_messages(kRounds / 2 + 1);
    pair.dialer.wait_for_messages(kRounds / 2);
  });
}

TEST_P(TransportConformance, LetsCallbacksDialSendAndClose) {
  in_world([](World& world) {
    Node third(world, "third");
    const std::string address = third.listen();
    std::shared_ptr<Channel> onward;
    Node* self = nullptr;
    Node::Options relay;
    relay.on_message = [&](const std::shared_ptr<Channel>& channel, const Message& message) {
      onward = self->connect(address);
      send(*onward, parcel_of(message));
      onward->close();
      channel->close();
    };
    Pair pair(world, {}, {});
    Node middle(world, "middle", relay);
    self = &middle;
    const auto channel = pair.dialer.connect(middle.listen());
    send(*channel, numbered(5));
    third.wait_for_messages(1);
    EXPECT_EQ(number_of(third.journal().parcels().at(0)), 5u);
    EXPECT_EQ(pair.dialer.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
    middle.wait_until([](const Journal& journal) { return journal.closed.size() == 2; });
  });
}

TEST_P(TransportConformance, ServesManyPeersAtOnce) {
  in_world([](World& world) {
    constexpr std::size_t kPeers = 20, kEach = 50;
    Node center(world, "center");
    const std::string address = center.listen();
    std::vector<std::unique_ptr<Node>> peers;
    std::vector<std::shared_ptr<Channel>> channels;
    for (std::size_t p = 0; p < kPeers; ++p) {
      peers.push_back(std::make_unique<Node>(world, "peer" + std::to_string(p)));
      channels.push_back(peers.back()->connect(address));
    }
    for (std::uint64_t i = 0; i < kEach; ++i) {
      for (std::uint64_t p = 0; p < kPeers; ++p) send(*channels[p], numbered(p << 32 | i));
    }
    center.wait_for_messages(kPeers * kEach);
    std::map<Channel*, std::uint64_t> next;
    std::map<Channel*, std::uint64_t> who;
    for (const Journal::Received& one : center.journal().received) {
      const std::uint64_t number = number_of(one.parcel);
      who.try_emplace(one.channel.get(), number >> 32);
      ASSERT_EQ(number >> 32, who[one.channel.get()]);
      ASSERT_EQ(number & 0xffffffff, next[one.channel.get()]++);
    }
    EXPECT_EQ(who.size(), kPeers);
  });
}

TEST_P(TransportConformance, WakeEndsTheNextWaitEvenAfterAPoll) {
  in_world([](World& world) {
    Node::Options not_reading;
    not_reading.drive = false;
    Node node(world, "node", not_reading);
    node.transport().wake();
    node.transport().poll();
    node.transport().wait(Deadline::never());
    Thread waker = world.executor().spawn("waker", [&] { node.transport().wake(); });
    node.transport().wait(Deadline::never());
  });
}

TEST_P(TransportConformance, WaitsNoLongerThanItsDeadline) {
  in_world([](World& world) {
    Node::Options not_reading;
    not_reading.drive = false;
    Node node(world, "node", not_reading);
    const TimePoint start = world.executor().now();
    node.transport().wait(world.executor().deadline_in(std::chrono::milliseconds(20)));
    EXPECT_GE(world.executor().now() - start, std::chrono::milliseconds(20));
    EXPECT_FALSE(node.transport().poll());
  });
}

}  // namespace
}  // namespace torchspan::net::conformance::transport_traffic
