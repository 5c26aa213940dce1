#include <gmock/gmock.h>

#include "tests/conformance/transport_echo.h"

/// What a transport guarantees for a peer that is known only by its address and may be killed.
namespace torchspan::net::conformance::transport_peers {
namespace {

using ::testing::HasSubstr;

TEST_P(TransportPeerConformance, EchoesWhatWasSent) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  in_world([&](World& world) {
    std::mt19937 random(seed);
    const auto echo = world.start_echo("echo");
    Node node(world, "node");
    const auto channel = node.connect(echo->address());
    std::vector<Parcel> sent;
    for (int i = 0; i < 100; ++i) send(*channel, sent.emplace_back(random_parcel(random)));
    node.wait_for_messages(sent.size());
    EXPECT_TRUE(node.take_parcels() == sent);
  });
}

TEST_P(TransportPeerConformance, EchoesBulk) {
  in_world([](World& world) {
    const auto echo = world.start_echo("echo");
    Node node(world, "node");
    const auto channel = node.connect(echo->address());
    // More than any transport sends ahead: 16 MiB. A larger one is in DeliversHugeSegmentsAndHeaders.
    const Parcel parcel{bytes_of("bulk"), {pattern(20 << 20, 6)}};
    send(*channel, parcel);
    node.wait_for_messages(1);
    EXPECT_TRUE(node.take_parcels().at(0) == parcel);
  });
}

TEST_P(TransportPeerConformance, ReportsAtOnceThatAnIdlePeerWasKilled) {
  in_world([](World& world) {
    const auto echo = world.start_echo("echo");
    Node node(world, "node");
    const auto channel = node.connect(echo->address());
    send(*channel, numbered(1));
    node.wait_for_messages(1);
    const std::string name = world.named(echo->address());
    const TimePoint killed = world.executor().now();
    echo->kill();
    const Error error = node.wait_for_end(channel);
    EXPECT_LT(world.executor().now() - killed, std::chrono::seconds(10)) << "silence lasts a minute";
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.message(), HasSubstr(name));
    EXPECT_THAT(error.message(), HasSubstr("died or was killed"));
  });
}

TEST_P(TransportPeerConformance, ReportsAtOnceThatAPeerWasKilledThoughItsForkedChildLives) {
  in_world([](World& world) {
    auto echo = world.start_echo("echo");
    const std::string address = echo->address();
    Node node(world, "node");
    const auto channel = node.connect(address);
    send(*channel, numbered(1));
    node.wait_for_messages(1);
    if (!echo->fork_child()) return;  // a thread of this process cannot
    send(*channel, numbered(2));
    node.wait_for_messages(2);
    const TimePoint killed = world.executor().now();
    echo->kill();
    EXPECT_EQ(node.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
    EXPECT_LT(world.executor().now() - killed, std::chrono::seconds(10)) << "silence lasts a minute";
    // The child must not keep the address in use either.
    const auto again = world.start_echo("echo");
    ASSERT_EQ(again->address(), address);
    send(*node.connect(address), numbered(3));
    node.wait_for_messages(3);
  });
}

/// Kills an echo during a bulk transfer; returns how long the report of its death took.
Duration kill_amid_bulk(World& world) {
  const auto echo = world.start_echo("echo");
  Node node(world, "node");
  const auto channel = node.connect(echo->address());
  Thread busy = world.executor().spawn("sender", [&] {
    try {
      for (std::uint64_t i = 0;;) {
        if (channel->unsent_bytes() < (std::size_t{64} << 20))
          send(*channel, {numbered(i++).header, {Bytes(1 << 20)}});
        world.executor().yield();
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    }
  });
  node.wait_for_messages(5);
  const TimePoint killed = world.executor().now();
  echo->kill();
  EXPECT_EQ(node.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
  const Duration took = world.executor().now() - killed;
  busy.join();
  node.stop();
  EXPECT_EQ(node.journal().reasons(channel).size(), 1u);
  const auto parcels = node.journal().parcels();
  for (std::uint64_t i = 0; i < parcels.size(); ++i) {
    EXPECT_EQ(number_of(parcels[i]), i);
    EXPECT_EQ(parcels[i].segments.at(0).size(), std::size_t{1} << 20);
  }
  return took;
}

TEST_P(TransportPeerConformance, ReportsWithinASecondThatAPeerWasKilledDuringATransfer) {
  in_world([](World& world) {
    // A busy machine may be slow once; a transport that waits for silence is slow every time.
    Duration quickest = kill_amid_bulk(world);
    if (!world.dies_at_once()) return;
    for (int more = 0; more < 9 && quickest >= std::chrono::seconds(1); ++more) {
      quickest = std::min(quickest, kill_amid_bulk(world));
    }
    EXPECT_LT(quickest, std::chrono::seconds(1));
  });
}

TEST_P(TransportPeerConformance, ReconnectsToAPeerThatRestartedAtItsAddress) {
  in_world([](World& world) {
    auto echo = world.start_echo("echo");
    const std::string address = echo->address();
    Node node(world, "node");
    const auto before = node.connect(address);
    send(*before, numbered(1));
    node.wait_for_messages(1);
    echo->kill();
    node.wait_for_end(before);
    echo = world.start_echo("echo");
    ASSERT_EQ(echo->address(), address);
    send(*node.connect(address), numbered(2));
    node.wait_for_messages(2);
  });
}

TEST_P(TransportPeerConformance, KeepsOtherPeersWhenOneIsKilled) {
  in_world([](World& world) {
    const auto victim = world.start_echo("victim"), survivor = world.start_echo("survivor");
    Node node(world, "node");
    const auto lost = node.connect(victim->address()), kept = node.connect(survivor->address());
    send(*lost, numbered(1));
    send(*kept, numbered(2));
    node.wait_for_messages(2);
    victim->kill();
    node.wait_for_end(lost);
    send(*kept, numbered(3));
    node.wait_for_messages(3);
    EXPECT_EQ(number_of(node.journal().parcels().at(2)), 3u);
  });
}

}  // namespace
}  // namespace torchspan::net::conformance::transport_peers
