#include "net/handshake.h"

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <random>
#include <string>

#include "tests/support/errors.h"

namespace torchspan::net::handshake_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;

constexpr std::size_t kHello = 56, kProof = 33;

Secret secret_of(char fill) { return Secret::from_bytes(Bytes(32, static_cast<std::byte>(fill))); }

HandshakeOptions options_of(char secret = 's') {
  HandshakeOptions options{.secret = secret_of(secret), .peer = "unix:/run/peer"};
  draw_nonce(options.nonce);
  return options;
}

/// Two sides; the test carries their bytes. Records what each side sent and why it failed.
struct Pair {
  Pair(HandshakeOptions dial, HandshakeOptions listen)
      : dialer(Role::kDialer, std::move(dial)), listener(Role::kListener, std::move(listen)) {}

  void run(std::size_t piece = SIZE_MAX) {
    for (int round = 0; round < 4; ++round) {
      carry(dialer, listener, from_dialer, listener_failure, piece);
      carry(listener, dialer, from_listener, dialer_failure, piece);
    }
  }
  static void carry(Handshake& from, Handshake& to, Bytes& record, std::optional<Error>& failure,
                    std::size_t piece) {
    const Bytes bytes = from.take_output();
    record.insert(record.end(), bytes.begin(), bytes.end());
    for (std::size_t at = 0; at < bytes.size() && !failure; at += piece) {
      try {
        to.receive(BytesView(bytes).subspan(at, std::min(piece, bytes.size() - at)));
      } catch (const Error& error) {
        failure = error;
      }
      if (piece == SIZE_MAX) break;
    }
  }

  Handshake dialer, listener;
  Bytes from_dialer, from_listener;
  std::optional<Error> dialer_failure, listener_failure;
};

TEST(Handshake, IsDoneOnBothSidesWhenTheyShareTheSecret) {
  Pair pair(options_of(), options_of());
  pair.run();
  EXPECT_TRUE(pair.dialer.done());
  EXPECT_TRUE(pair.listener.done());
  EXPECT_EQ(pair.dialer.version(), 1);
  EXPECT_EQ(pair.from_dialer.size(), kHello + kProof);
  EXPECT_EQ(pair.from_listener.size(), kHello + kProof);
}

TEST(Handshake, WorksByteByByte) {
  Pair pair(options_of(), options_of());
  pair.run(1);
  EXPECT_TRUE(pair.dialer.done());
  EXPECT_TRUE(pair.listener.done());
}

TEST(Handshake, IsDeniedOnBothSidesWhenTheSecretsDiffer) {
  Pair pair(options_of('a'), options_of('b'));
  pair.run();
  ASSERT_TRUE(pair.dialer_failure && pair.listener_failure);
  EXPECT_EQ(pair.dialer_failure->kind(), ErrorKind::kDenied);
  EXPECT_EQ(pair.listener_failure->kind(), ErrorKind::kDenied);
  EXPECT_THAT(pair.dialer_failure->message(), HasSubstr("unix:/run/peer"));
  EXPECT_THAT(pair.dialer_failure->message(), HasSubstr("TORCHSPAN_SECRET_FILE"));
  EXPECT_FALSE(pair.dialer.done());
  EXPECT_FALSE(pair.listener.done());
}

TEST(Handshake, RevealsNothingDerivedFromTheSecretToAnUnauthenticatedDialer) {
  Pair pair(options_of('a'), options_of('b'));
  pair.run();
  EXPECT_EQ(pair.from_listener.size(), kHello + 1) << "a greeting and a refusal";
}

TEST(Handshake, NeverSendsTheSecret) {
  HandshakeOptions options = options_of();
  Bytes key(options.secret.bytes().begin(), options.secret.bytes().end());
  Pair pair(options_of(), options_of());
  pair.run();
  for (const Bytes& said : {pair.from_dialer, pair.from_listener}) {
    EXPECT_EQ(std::search(said.begin(), said.end(), key.begin(), key.begin() + 8), said.end());
  }
}

TEST(Handshake, NeedsEveryByte) {
  Pair whole(options_of(), options_of());
  whole.run();
  for (std::size_t length = 0; length < kHello + kProof; ++length) {
    SCOPED_TRACE(length);
    Pair cut(options_of(), options_of());
    Handshake& listener = cut.listener;
    const Bytes hello = cut.dialer.take_output();
    listener.receive(BytesView(hello).first(std::min(length, kHello)));
    if (length > kHello) {
      cut.dialer.receive(listener.take_output());
      listener.receive(BytesView(cut.dialer.take_output()).first(length - kHello));
    }
    EXPECT_FALSE(listener.done());
  }
}

TEST(Handshake, LeavesTheBytesAfterItForTheFrames) {
  Pair pair(options_of(), options_of());
  pair.listener.receive(pair.dialer.take_output());
  pair.dialer.receive(pair.listener.take_output());
  Bytes bytes = pair.dialer.take_output();
  ASSERT_EQ(bytes.size(), kProof);
  bytes.resize(kProof + 7);
  EXPECT_EQ(pair.listener.receive(bytes), kProof);
  EXPECT_EQ(pair.listener.receive(bytes), 0u) << "nothing is the handshake's once it is done";
}

TEST(Handshake, DeniesWhenAnyOneBitOfEitherSideIsFlipped) {
  for (std::size_t bit = 0; bit < (kHello + kProof) * 8; ++bit) {
    for (const bool of_dialer : {true, false}) {
      SCOPED_TRACE(::testing::Message() << (of_dialer ? "dialer" : "listener") << " bit " << bit);
      Pair pair(options_of(), options_of());
      std::size_t carried = 0;
      const auto carry = [&](Handshake& from, Handshake& to, bool tampered) {
        Bytes bytes = from.take_output();
        if (tampered && bit / 8 >= carried && bit / 8 < carried + bytes.size()) {
          bytes[bit / 8 - carried] ^= static_cast<std::byte>(1u << bit % 8);
        }
        if (tampered) carried += bytes.size();
        to.receive(bytes);
      };
      const Error error = error_of([&] {
        for (int round = 0; round < 2; ++round) {
          carry(pair.dialer, pair.listener, of_dialer);
          carry(pair.listener, pair.dialer, !of_dialer);
        }
        // A tampered length of a record leaves one side waiting; the transport's timeout would end that.
        if (!pair.dialer.done() || !pair.listener.done()) throw Error(ErrorKind::kDenied, "still waiting");
      });
      EXPECT_TRUE(error.kind() == ErrorKind::kDenied || error.kind() == ErrorKind::kInvalid ||
                  error.kind() == ErrorKind::kUnsupported);
    }
  }
}

TEST(Handshake, DeniesReflectedMessages) {
  for (const Role role : {Role::kDialer, Role::kListener}) {
    Handshake side(role, options_of());
    const Bytes mirrored = side.take_output();
    EXPECT_EQ(error_of([&] { side.receive(mirrored); }).kind(), ErrorKind::kDenied);
    EXPECT_TRUE(side.take_output().empty()) << "no proof for a mirror";
  }
}

TEST(Handshake, DeniesReflectedMessagesWithTheRoleChanged) {
  Handshake dialer(Role::kDialer, options_of());
  Bytes mirrored = dialer.take_output();
  mirrored[8] = static_cast<std::byte>(Role::kListener);
  EXPECT_EQ(error_of([&] { dialer.receive(mirrored); }).kind(), ErrorKind::kDenied);
}

TEST(Handshake, DeniesTheDialersOwnProofAsTheListeners) {
  Handshake dialer(Role::kDialer, options_of());
  Handshake listener(Role::kListener, options_of());
  dialer.take_output();
  dialer.receive(listener.take_output());
  const Bytes own_proof = dialer.take_output();
  ASSERT_EQ(own_proof.size(), kProof);
  EXPECT_EQ(error_of([&] { dialer.receive(own_proof); }).kind(), ErrorKind::kDenied);
}

TEST(Handshake, DeniesAReplayOfAnotherHandshake) {
  Pair recorded(options_of(), options_of());
  recorded.run();
  Handshake listener(Role::kListener, options_of());
  EXPECT_EQ(error_of([&] { listener.receive(recorded.from_dialer); }).kind(), ErrorKind::kDenied);
  Handshake dialer(Role::kDialer, options_of());
  EXPECT_EQ(error_of([&] { dialer.receive(recorded.from_listener); }).kind(), ErrorKind::kDenied);
}

TEST(Handshake, AgreesOnTheHighestCommonVersionAndTheCommonFeatures) {
  HandshakeOptions dial = options_of(), listen = options_of();
  dial.lowest = 1, dial.highest = 5, dial.features = 0b0110;
  listen.lowest = 3, listen.highest = 9, listen.features = 0b1100;
  Pair pair(dial, listen);
  pair.run();
  ASSERT_TRUE(pair.dialer.done() && pair.listener.done());
  EXPECT_EQ(pair.dialer.version(), 5);
  EXPECT_EQ(pair.listener.version(), 5);
  EXPECT_EQ(pair.dialer.features(), 0b0100u);
  EXPECT_EQ(pair.listener.features(), 0b0100u);
}

TEST(Handshake, NamesBothVersionsOnBothSidesWhenNoneIsCommon) {
  HandshakeOptions dial = options_of(), listen = options_of();
  dial.lowest = dial.highest = 7;
  listen.lowest = 3, listen.highest = 5;
  Pair pair(dial, listen);
  pair.run();
  ASSERT_TRUE(pair.dialer_failure && pair.listener_failure);
  for (const Error& error : {*pair.dialer_failure, *pair.listener_failure}) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.message(), HasSubstr("7"));
    EXPECT_THAT(error.message(), HasSubstr("3 to 5"));
  }
}

TEST(Handshake, RefusesAnEmptySecret) {
  EXPECT_THROW(Handshake(Role::kDialer, HandshakeOptions{.secret = {}, .peer = "peer"}), Error);
}

TEST(Handshake, FailsAtTheFirstWrongByteOfAnotherProtocol) {
  const std::string request = "GET / HTTP/1.1\r\n";
  Handshake listener(Role::kListener, options_of());
  EXPECT_EQ(error_of([&] { listener.receive(std::as_bytes(std::span(request)).first(1)); }).kind(),
            ErrorKind::kInvalid);
}

TEST(Handshake, RejectsGarbageAfterAValidBeginning) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    Handshake dialer(Role::kDialer, options_of());
    const Bytes good = dialer.take_output();
    Bytes bytes(good.begin(), good.begin() + random() % (good.size() + 1));
    const std::size_t more = random() % 200;
    for (std::size_t i = 0; i < more; ++i) bytes.push_back(static_cast<std::byte>(random()));
    Handshake listener(Role::kListener, options_of());
    try {
      listener.receive(bytes);
    } catch (const Error&) {
    }
    EXPECT_FALSE(listener.done());
  }
}

}  // namespace
}  // namespace torchspan::net::handshake_test
