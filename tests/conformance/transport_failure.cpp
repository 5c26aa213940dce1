#include <atomic>
#include <gmock/gmock.h>

#include "tests/conformance/transport_node.h"
#include "tests/support/errors.h"

/// What a transport guarantees when a failure occurs, or when it ends.
namespace torchspan::net::conformance::transport_failure {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;

/// Sends on a channel that may already have ended.
void send_if_open(Channel& channel, const Parcel& parcel) {
  try {
    send(channel, parcel);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
  }
}

Node::Options not_reading() {
  Node::Options options;
  options.drive = false;
  return options;
}

Node::Options with(const std::function<void(TransportOptions&)>& change) {
  Node::Options options;
  change(options.transport);
  return options;
}

TEST_P(TransportConformance, CloseDeliversWhatWasSentBefore) {
  in_world([](World& world) {
    Node listener(world, "listener", not_reading());
    Node dialer(world, "dialer");
    const auto channel = dialer.connect(listener.listen());
    for (std::uint64_t i = 0; i < 100; ++i) {
      Parcel parcel = numbered(i);
      parcel.segments.emplace_back(100'000);
      send(*channel, parcel);
    }
    channel->close();
    listener.drive();
    const Error heard = listener.wait_for_end(listener.wait_for_caller());
    EXPECT_EQ(heard.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(heard.message(), HasSubstr("closed the channel")) << "a close is no death";
    const Error own = dialer.wait_for_end(channel);
    EXPECT_EQ(own.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(own.message(), HasSubstr("this side closed the channel to '" + channel->peer() + "'"));
    const auto parcels = listener.journal().parcels();
    ASSERT_EQ(parcels.size(), 100u);
    for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(number_of(parcels[i]), i);
  });
}

TEST_P(TransportConformance, CloseByBothSidesDeliversWhatBothSent) {
  in_world([](World& world) {
    Node listener(world, "listener"), dialer(world, "dialer");
    const auto channel = dialer.connect(listener.listen());
    const auto back = listener.wait_for_caller();
    send(*back, numbered(1));
    dialer.wait_for_messages(1);
    listener.pause();
    dialer.pause();
    for (std::uint64_t i = 0; i < 50; ++i) {
      send(*channel, {numbered(i).header, {Bytes(100'000)}});
      send(*back, {numbered(i).header, {Bytes(100'000)}});
    }
    channel->close();
    back->close();
    listener.drive();
    dialer.drive();
    EXPECT_EQ(dialer.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
    EXPECT_EQ(listener.wait_for_end(back).kind(), ErrorKind::kDisconnected);
    EXPECT_EQ(listener.journal().received.size(), 50u);
    EXPECT_EQ(dialer.journal().received.size(), 51u);
  });
}

TEST_P(TransportConformance, SendsNothingMoreAfterClose) {
  in_world([](World& world) {
    Node listener(world, "listener"), dialer(world, "dialer");
    const auto channel = dialer.connect(listener.listen());
    send(*channel, numbered(1));
    channel->close();
    channel->close();
    const Error error = error_of([&] { send(*channel, numbered(2)); });
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.message(), HasSubstr(channel->peer()));
    dialer.wait_for_end(channel);
    EXPECT_EQ(error_of([&] { send(*channel, numbered(3)); }).kind(), ErrorKind::kDisconnected);
    listener.wait_for_end(listener.wait_for_caller());
    EXPECT_EQ(listener.journal().received.size(), 1u);
    EXPECT_EQ(channel->unsent_bytes(), 0u);
  });
}

TEST_P(TransportConformance, ClosesBeforeTheHandshakeOnlyAfterDelivering) {
  in_world([](World& world) {
    Node listener(world, "listener", not_reading());
    Node dialer(world, "dialer");
    const auto channel = dialer.connect(listener.listen());
    send(*channel, numbered(1));
    channel->close();
    listener.drive();
    listener.wait_for_messages(1);
    dialer.wait_for_end(channel);
  });
}

TEST_P(TransportConformance, AClosedChannelDoesNotWaitForeverForAPeerThatDoesNotRead) {
  in_world([](World& world) {
    Node listener(world, "listener", not_reading());
    Node dialer(world, "dialer", with([](TransportOptions& options) {
                  options.linger = std::chrono::milliseconds(20);
                  options.handshake_timeout = std::chrono::milliseconds(20);
                }));
    const auto channel = dialer.connect(listener.listen());
    channel->close();
    EXPECT_EQ(dialer.wait_for_end(channel).kind(), ErrorKind::kTimedOut);

    Node second(world, "second"),
        third(world, "third",
              with([](TransportOptions&options) { options.linger = std::chrono::milliseconds(20); }));
    const auto other = third.connect(second.listen());
    second.wait_for_caller();
    send(*other, numbered(1));
    second.wait_for_messages(1);
    second.pause();
    other->close();
    EXPECT_THAT(third.wait_for_end(other).message(), HasSubstr("did not acknowledge it in time"));
  });
}

TEST_P(TransportConformance, QueuesUpToItsLimitAndRecovers) {
  in_world([](World& world) {
    constexpr std::uint64_t kLimit = 4 << 20;
    Node listener(world, "listener", not_reading());
    Node dialer(world, "dialer", with([](TransportOptions& options) { options.max_unsent = kLimit; }));
    const auto channel = dialer.connect(listener.listen());
    std::uint64_t sent = 0;
    const Error error = error_of([&] {
      for (; sent < 1000; ++sent) send(*channel, {numbered(sent).header, {Bytes(100'000)}});
    });
    EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
    EXPECT_THAT(error.message(), HasSubstr("max_unsent"));
    EXPECT_LE(channel->unsent_bytes(), kLimit);
    EXPECT_GE(channel->unsent_bytes(), kLimit / 2);
    listener.drive();
    listener.wait_for_messages(sent);
    const std::uint64_t all = sent + 20;
    for (; sent < all; ++sent) send(*channel, {numbered(sent).header, {Bytes(100'000)}});
    listener.wait_for_messages(all);
    const auto parcels = listener.journal().parcels();
    for (std::uint64_t i = 0; i < all; ++i) EXPECT_EQ(number_of(parcels.at(i)), i);
  });
}

TEST_P(TransportConformance, TakesAMessageLargerThanTheQueueWhenNothingIsQueued) {
  in_world([](World& world) {
    Node listener(world, "listener", not_reading());
    Node dialer(world, "dialer", with([](TransportOptions& options) { options.max_unsent = 1000; }));
    const auto channel = dialer.connect(listener.listen());
    send(*channel, {{}, {Bytes(3 << 20)}});
    EXPECT_EQ(error_of([&] { send(*channel, numbered(1)); }).kind(), ErrorKind::kOverloaded);
    listener.drive();
    listener.wait_for_messages(1);
  });
}

TEST_P(TransportConformance, RefusesAMessageBeyondItsLimitsAndSendsNothingOfIt) {
  in_world([](World& world) {
    Node listener(world, "listener");
    Node dialer(world, "dialer", with([](TransportOptions& options) {
                  options.max_header = 100;
                  options.max_message = 1000;
                  options.max_segments = 3;
                }));
    const auto channel = dialer.connect(listener.listen());
    for (const Parcel& parcel : {Parcel{Bytes(101), {}}, Parcel{{}, std::vector<Bytes>(4)},
                                 Parcel{Bytes(1), {Bytes(500), Bytes(500)}}}) {
      EXPECT_EQ(error_of([&] { send(*channel, parcel); }).kind(), ErrorKind::kInvalid);
    }
    const Parcel largest{Bytes(100), {Bytes(450), {}, Bytes(450)}};
    send(*channel, largest);
    listener.wait_for_messages(1);
    EXPECT_EQ(listener.journal().parcels(), std::vector<Parcel>{largest});
  });
}

TEST_P(TransportConformance, CutsOffAPeerThatSendsBeyondTheReceiversLimits) {
  const auto limit = [](const std::function<void(TransportOptions&)>& change, const Parcel& parcel) {
    return [change, parcel](World& world) {
      Node listener(world, "listener", with(change));
      Node dialer(world, "dialer");
      const auto channel = dialer.connect(listener.listen());
      send(*channel, numbered(1));
      send(*channel, parcel);
      EXPECT_EQ(dialer.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
      const auto back = listener.wait_for_caller();
      EXPECT_EQ(listener.wait_for_end(back).kind(), ErrorKind::kInvalid);
      EXPECT_EQ(listener.journal().received.size(), 1u);
    };
  };
  in_world(limit([](TransportOptions& options) { options.max_header = 100; }, {Bytes(101), {}}));
  in_world(limit([](TransportOptions& options) { options.max_message = 1000; }, {{}, {Bytes(2000)}}));
  in_world(limit([](TransportOptions& options) { options.max_segments = 3; }, {{}, std::vector<Bytes>(4)}));
}

TEST_P(TransportConformance, CutsOffAPeerWhoseSegmentFindsNoMemory) {
  in_world([](World& world) {
    Node listener(world, "listener", with([](TransportOptions& options) {
                    options.allocator = [](std::size_t size) {
                      return size > 1000 ? Buffer() : allocate_buffer(size);
                    };
                  }));
    Node dialer(world, "dialer");
    const auto channel = dialer.connect(listener.listen());
    send(*channel, {{}, {Bytes(1000)}});
    send(*channel, {{}, {Bytes(1001)}});
    EXPECT_EQ(listener.wait_for_end(listener.wait_for_caller()).kind(), ErrorKind::kOverloaded);
    EXPECT_EQ(listener.journal().received.size(), 1u);
    EXPECT_EQ(dialer.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
  });
}

TEST_P(TransportConformance, ReportsNoListenerAndConnectsOnceOneExists) {
  in_world([](World& world) {
    Node dialer(world, "dialer");
    const std::string deserted = world.unused_address();
    const auto channel = dialer.connect(deserted);
    send_if_open(*channel, numbered(1));
    const Error error = dialer.wait_for_end(channel);
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.message(), HasSubstr(world.named(deserted)));
    EXPECT_EQ(channel->unsent_bytes(), 0u);

    Node late(world, "late");
    send(*dialer.connect(late.listen()), numbered(2));
    late.wait_for_messages(1);
  });
}

TEST_P(TransportConformance, GivesUpOnAListenerThatNeverAnswers) {
  in_world([](World& world) {
    Node listener(world, "listener", not_reading());
    Node dialer(world, "dialer");
    const std::string address = listener.listen();
    const auto channel = dialer.connect(address, world.executor().deadline_in(std::chrono::milliseconds(20)));
    const Error error = dialer.wait_for_end(channel);
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.message(), HasSubstr(world.named(address)));
  });
}

TEST_P(TransportConformance, RefusesAddressesItCannotRead) {
  in_world([](World& world) {
    Node node(world, "node");
    for (const char* address : {"", ":", "nonsense", "carrier-pigeon:coop", "unix:", "tcp:", "sim:"}) {
      SCOPED_TRACE(address);
      EXPECT_FALSE(node.transport().can_reach(address));
      EXPECT_EQ(error_of([&] { node.connect(address); }).kind(), ErrorKind::kInvalid);
      EXPECT_EQ(error_of([&] { node.transport().listen(address); }).kind(), ErrorKind::kInvalid);
    }
    EXPECT_TRUE(node.transport().can_reach(world.unused_address()));
  });
}

TEST_P(TransportConformance, RejectsListeningAtAnAddressInUse) {
  in_world([](World& world) {
    Node node(world, "node");
    const std::string address = node.listen();
    const Error error = error_of([&] { node.transport().listen(address); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("in use"));
  });
}

TEST_P(TransportConformance, DeniesAWrongSecretOnBothSides) {
  in_world([](World& world) {
    Node listener(world, "listener");
    Node dialer(world, "dialer", with([](TransportOptions& options) {
                  options.secret = Secret::from_bytes(bytes_of("the secret of another job"));
                }));
    const auto channel = dialer.connect(listener.listen());
    send_if_open(*channel, numbered(1));
    EXPECT_EQ(dialer.wait_for_end(channel).kind(), ErrorKind::kDenied);
    listener.wait_until([](const Journal& journal) { return !journal.refused.empty(); });
    const Journal journal = listener.journal();
    EXPECT_EQ(journal.refused.at(0).kind(), ErrorKind::kDenied);
    EXPECT_TRUE(journal.accepted.empty());
    EXPECT_TRUE(journal.received.empty());
    EXPECT_TRUE(journal.closed.empty());
  });
}

TEST_P(TransportConformance, ClosesAnUnauthenticatedPeerThatSendsGarbage) {
  in_world([](World& world) {
    Node listener(world, "listener");
    const std::string address = listener.listen();
    for (const std::string& garbage :
         {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(1 << 20, '\0'), std::string(1 << 16, '\xff'),
          std::string("\x89TSPAN\r\n") + std::string(500, 'x')}) {
      const auto unauthenticated = world.make_unauthenticated_peer();
      unauthenticated->dial(address, bytes_of(garbage));
      EXPECT_TRUE(unauthenticated->sees_hang_up());
    }
    Node honest(world, "honest");
    send(*honest.connect(address), numbered(1));
    listener.wait_for_messages(1);
    const Journal journal = listener.journal();
    EXPECT_EQ(journal.accepted.size(), 1u);
    EXPECT_EQ(journal.refused.size(), 4u);
  });
}

TEST_P(TransportConformance, ClosesAnUnauthenticatedPeerThatSendsTooLittle) {
  in_world([](World& world) {
    Node listener(world, "listener", with([](TransportOptions& options) {
                    options.handshake_timeout = std::chrono::milliseconds(30);
                  }));
    const std::string address = listener.listen();
    const auto silent = world.make_unauthenticated_peer(), slow = world.make_unauthenticated_peer();
    silent->dial(address, {});
    slow->dial(address, bytes_of(world.greeting_start()));
    slow->send(bytes_of("\r"));
    EXPECT_TRUE(silent->sees_hang_up());
    EXPECT_TRUE(slow->sees_hang_up());
    listener.wait_until([](const Journal& journal) { return journal.refused.size() == 2; });
    for (const Error& error : listener.journal().refused) EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
  });
}

TEST_P(TransportConformance, ClosesTheOldestUnauthenticatedPeerAtTheLimit) {
  in_world([](World& world) {
    Node listener(world, "listener", with([](TransportOptions& options) {
                    options.max_unauthenticated = 2;
                    options.handshake_timeout = std::chrono::hours(1);
                  }));
    const std::string address = listener.listen();
    const auto first = world.make_unauthenticated_peer(), second = world.make_unauthenticated_peer();
    first->dial(address, {});
    second->dial(address, {});
    Node honest(world, "honest");
    send(*honest.connect(address), numbered(1));
    listener.wait_for_messages(1);
    EXPECT_TRUE(first->sees_hang_up());
    const Journal journal = listener.journal();
    ASSERT_GE(journal.refused.size(), 1u);
    EXPECT_EQ(journal.refused.at(0).kind(), ErrorKind::kTimedOut);
    EXPECT_EQ(journal.accepted.size(), 1u);
  });
}

TEST_P(TransportConformance, AdmitsAuthenticatedPeersDuringAFloodOfUnauthenticatedOnes) {
  in_world([](World& world) {
    Node listener(world, "listener", with([](TransportOptions& options) {
                    options.max_unauthenticated = 2;
                    // The oldest ones have less while the listener is full.
                    options.handshake_timeout = std::chrono::seconds(5);
                  }));
    const std::string address = listener.listen();
    std::vector<std::unique_ptr<UnauthenticatedPeer>> unauthenticated_peers;
    for (int i = 0; i < 5; ++i) unauthenticated_peers.push_back(world.make_unauthenticated_peer());
    for (const auto& unauthenticated : unauthenticated_peers) unauthenticated->dial(address, {});
    Node honest(world, "honest");
    send(*honest.connect(address), numbered(1));
    listener.wait_for_messages(1);
  });
}

TEST_P(TransportConformance, ReportsEveryChannelsEndExactlyOnce) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  in_world([&](World& world) {
    std::mt19937 random(seed);
    Node listener(world, "listener"), dialer(world, "dialer");
    const std::string address = listener.listen();
    auto victim = std::make_unique<Node>(world, "victim");
    const std::string victim_address = victim->listen();
    std::vector<std::shared_ptr<Channel>> channels;
    for (int i = 0; i < 60; ++i) {
      const std::uint32_t fate = random() % 4;
      const auto channel = dialer.connect(fate == 0   ? world.unused_address()
                                          : fate == 1 ? victim_address
                                                      : address);
      channels.push_back(channel);
      if (random() % 2 == 0) send_if_open(*channel, random_parcel(random));
      if (fate >= 2) channel->close();
    }
    victim.reset();
    for (const auto& channel : channels) dialer.wait_for_end(channel);
    listener.wait_until(
        [](const Journal& journal) { return journal.closed.size() == journal.accepted.size(); });
    listener.stop();
    dialer.stop();
    for (const auto& channel : channels) EXPECT_EQ(dialer.journal().reasons(channel).size(), 1u);
    for (const auto& channel : listener.journal().accepted) {
      EXPECT_EQ(listener.journal().reasons(channel).size(), 1u);
    }
    EXPECT_EQ(dialer.journal().closed.size(), channels.size());
  });
}

TEST_P(TransportConformance, NoticesAPeerThatDiesInTheMiddleOfAMessage) {
  in_world([](World& world) {
    Node listener(world, "listener", not_reading());
    auto dialer = std::make_unique<Node>(world, "dialer");
    const auto channel = dialer->connect(listener.listen());
    send(*channel, numbered(1));
    listener.drive();
    listener.wait_for_messages(1);
    Thread busy = world.executor().spawn("sender", [&] {
      try {
        for (;;) {
          if (channel->unsent_bytes() < (std::size_t{16} << 20)) {
            send(*channel, {numbered(2).header, {Bytes(1 << 20)}});
          }
          world.executor().yield();
        }
      } catch (const Error&) {
      }
    });
    listener.wait_for_messages(3);
    dialer.reset();
    busy.join();
    const auto back = listener.wait_for_caller();
    const Error error = listener.wait_for_end(back);
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.message(), HasSubstr(back->peer()));
    for (const Parcel& parcel : listener.journal().parcels()) {
      for (const Bytes& segment : parcel.segments) EXPECT_EQ(segment.size(), std::size_t{1} << 20);
    }
  });
}

TEST_P(TransportConformance, EndsSafelyWhileTrafficIsInFlightOnBothSides) {
  in_world([](World& world) {
    const auto round = [&world](std::unique_ptr<Node>& listener, Node& dialer) {
      const auto channel = dialer.connect(listener->listen());
      const auto back = listener->wait_for_caller();
      std::vector<Thread> senders;
      for (const auto& end : {channel, back, channel, back}) {
        senders.push_back(world.executor().spawn("sender", [&world, end] {
          const Error error = error_of([&] {
            for (;;) {
              if (end->unsent_bytes() < 1'000'000)
                send(*end, {numbered(1).header, {Bytes(50'000), Bytes(3)}});
              world.executor().yield();
            }
          });
          EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
        }));
      }
      listener->wait_for_messages(20);
      listener.reset();
      senders.clear();
      EXPECT_EQ(dialer.wait_for_end(channel).kind(), ErrorKind::kDisconnected);
      EXPECT_EQ(error_of([&] { send(*back, numbered(2)); }).kind(), ErrorKind::kDisconnected);
      back->close();
    };
    // All at once: a transport over UCX takes seconds to end.
    constexpr int kRounds = 5;
    std::vector<std::unique_ptr<Node>> listeners, dialers;
    for (int i = 0; i < kRounds; ++i) {
      listeners.push_back(std::make_unique<Node>(world, "listener" + std::to_string(i)));
      dialers.push_back(std::make_unique<Node>(world, "dialer" + std::to_string(i)));
    }
    std::vector<Thread> rounds;
    for (int i = 0; i < kRounds; ++i) {
      rounds.push_back(world.executor().spawn("round", [&, i] {
        round(listeners[i], *dialers[i]);
        dialers[i].reset();
      }));
    }
  });
}

}  // namespace
}  // namespace torchspan::net::conformance::transport_failure
