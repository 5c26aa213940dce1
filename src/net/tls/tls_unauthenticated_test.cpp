#include <cstring>
#include <fstream>
#include <gmock/gmock.h>
#include <openssl/ssl.h>

#include "net/tls/pieces.h"
#include "net/tls/record_cipher.h"
#include "net/tls/tls_test_tools.h"

/// Peers that a TLS transport does not admit, and authenticated peers that break the protocol.
namespace torchspan::net::tls_strangers_test {
namespace {

using ::testing::HasSubstr;

class TlsUnauthenticatedTest : public TlsTest {
 protected:
  TlsUnauthenticatedTest() { start({}); }

  void expect_refused(ErrorKind kind) {
    drive_until([&] { return !journal_.refused.empty(); });
    ASSERT_EQ(journal_.refused.size(), 1u);
    EXPECT_EQ(journal_.refused.at(0).kind(), kind) << journal_.refused.at(0).message();
    EXPECT_TRUE(journal_.accepted.empty());
    journal_.refused.clear();
    expect_honest_peer_served();
  }
  void expect_honest_peer_served() {
    const std::size_t before = journal_.received.size();
    transport_->connect(address_, Deadline::never())->send(Bytes(1), {});
    drive_until([&] { return journal_.received.size() == before + 1; });
  }
  /// A peer that has proved the secret and opened a channel with `hello`.
  std::unique_ptr<BarePeer> join(LaneHello hello, LaneHello* answer = nullptr) {
    auto peer = std::make_unique<BarePeer>(dial_raw(address_));
    drive_until([&] { return peer->shake_hands(); });
    peer->greet(hello);
    drive_until([&] { return peer->hears_greeting(); });
    if (answer != nullptr) *answer = peer->answer();
    return peer;
  }
  void expect_cut_off(ErrorKind kind, const std::string& why) {
    drive_until([&] { return !journal_.closed.empty(); });
    EXPECT_EQ(journal_.closed.at(0).kind(), kind);
    EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr(why));
    expect_honest_peer_served();
  }
  /// Dials with plain OpenSSL until the transport rejects the connection.
  void dial_with(SSL_CTX* context) {
    const Descriptor socket = dial_raw(address_);
    const SslPtr ssl(SSL_new(context));
    SSL_set_fd(ssl.get(), socket.get());
    drive_until([&] {
      const int result = SSL_connect(ssl.get());
      EXPECT_TRUE(result != 1 || journal_.accepted.empty());
      return !journal_.refused.empty();
    });
  }
};

using ContextPtr = std::unique_ptr<SSL_CTX, Release<SSL_CTX_free>>;

TEST_F(TlsUnauthenticatedTest, RefusesTls12) {
  const ContextPtr context(SSL_CTX_new(TLS_client_method()));
  SSL_CTX_set_max_proto_version(context.get(), TLS1_2_VERSION);
  dial_with(context.get());
  expect_refused(ErrorKind::kUnsupported);
}

TEST_F(TlsUnauthenticatedTest, RefusesTls13WithoutTheKey) {
  const ContextPtr context(SSL_CTX_new(TLS_client_method()));
  dial_with(context.get());
  expect_refused(ErrorKind::kDenied);
}

TEST_F(TlsUnauthenticatedTest, GivesNoTicketsTakesNoEarlyDataAndDrawsFreshKeys) {
  const TlsContext context(test_secret(), TlsOptions());
  const SslPtr ssl = context.make_connection(Role::kDialer, "127.0.0.1");
  SSL_CTX* dialing = SSL_get_SSL_CTX(ssl.get());
  SSL_CTX_set_session_cache_mode(dialing, SSL_SESS_CACHE_CLIENT);
  SSL_CTX_sess_set_new_cb(dialing, [](SSL*, SSL_SESSION*) {
    ADD_FAILURE() << "the listener sent a session ticket";
    return 0;
  });
  // The dialer would also accept a key exchange that uses the pre-shared key alone.
  SSL_set_options(ssl.get(), SSL_OP_ALLOW_NO_DHE_KEX);
  const Descriptor socket = dial_raw(address_);
  SSL_set_fd(ssl.get(), socket.get());
  drive_until([&] { return SSL_do_handshake(ssl.get()) == 1; });
  EXPECT_EQ(SSL_SESSION_get_max_early_data(SSL_get0_session(ssl.get())), 0u);
  EXPECT_NE(SSL_get_negotiated_group(ssl.get()), 0) << "a leaked secret would decrypt recorded traffic";
  EXPECT_EQ(SSL_get_cipher_name(ssl.get()), std::string("TLS_AES_128_GCM_SHA256"));
  Bytes greeting = encode(LaneHello{});
  greeting.resize(greeting.size() + kProbeBytes);
  SSL_set_mode(ssl.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  drive_until([&] {
    const int said = SSL_write(ssl.get(), greeting.data(), static_cast<int>(greeting.size()));
    if (said > 0) greeting.erase(greeting.begin(), greeting.begin() + said);
    return greeting.empty();
  });
  Bytes answer(kLaneHelloBytes);
  drive_until([&] { return SSL_read(ssl.get(), answer.data(), static_cast<int>(answer.size())) > 0; });
  EXPECT_EQ(journal_.accepted.size(), 1u);
}

TEST_F(TlsUnauthenticatedTest, RejectsAPeerThatSendsItsHandshakeTooSlowly) {
  TransportOptions options;
  options.handshake_timeout = std::chrono::milliseconds(200);
  start(options);
  const Descriptor loris = dial_raw(address_);
  // A TLS greeting of 16 KiB, one byte per millisecond.
  const std::uint8_t start[] = {0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc};
  std::size_t said = 0;
  TimePoint next{};
  drive_until([&] {
    if (executor_->now() < next) return !journal_.refused.empty();
    next = executor_->now() + std::chrono::milliseconds(1);
    const std::uint8_t byte = said < sizeof start ? start[said] : 0;
    if (::send(loris.get(), &byte, 1, MSG_NOSIGNAL) == 1) ++said;
    return !journal_.refused.empty();
  });
  EXPECT_GT(said, 6u);
  expect_refused(ErrorKind::kTimedOut);
}

TEST_F(TlsUnauthenticatedTest, ReadsLittleFromAPeerThatSendsMuch) {
  // A TLS greeting of 128 KiB, the largest that TLS allows, in records of 16 KiB.
  const Descriptor peer_socket = dial_raw(address_);
  Bytes record(5 + 16384);
  record[0] = std::byte{0x16};
  record[1] = std::byte{3};
  record[2] = std::byte{1};
  record[3] = std::byte{0x40};
  Bytes bytes;
  for (int i = 0; i < 8; ++i) bytes.insert(bytes.end(), record.begin(), record.end());
  bytes[5] = std::byte{1};
  bytes[6] = std::byte{1};
  std::size_t said = 0;
  drive_until([&] {
    const ssize_t sent = ::send(peer_socket.get(), bytes.data() + said, bytes.size() - said, MSG_NOSIGNAL);
    if (sent > 0) said += static_cast<std::size_t>(sent);
    return !journal_.refused.empty();
  });
  EXPECT_THAT(journal_.refused.at(0).message(), HasSubstr("65536 bytes before it proved anything"));
  expect_refused(ErrorKind::kInvalid);
}

TEST_F(TlsUnauthenticatedTest, RejectsAReplayedConnection) {
  // A peer between an honest dialer and the listener copies what the dialer sends.
  const auto listening = numeric_address(parse_tls_address("tls:127.0.0.1:0"));
  ListeningSocket listening_socket(*listening);
  TlsJournal dialer_journal;
  TransportOptions options;
  options.secret = test_secret();
  const auto dialer = make_tls_transport(*executor_, dialer_journal, options, {.lanes = 0});
  dialer->connect(with_port(parse_tls_address(address_), listening_socket.address().port), Deadline::never())
      ->send(Bytes(10), {});
  dialer->poll();
  Descriptor near(::accept(listening_socket.get(), nullptr, nullptr));
  ASSERT_EQ(::fcntl(near.get(), F_SETFL, O_NONBLOCK), 0);
  Descriptor far = dial_raw(address_);
  Bytes recorded;
  drive_until([&] {
    dialer->poll();
    forward(near, far, &recorded);
    forward(far, near, nullptr);
    return !journal_.received.empty();
  });
  ASSERT_EQ(journal_.accepted.size(), 1u);
  journal_.accepted.clear();
  const Descriptor replay = dial_raw(address_);
  say(replay, recorded);
  expect_refused(ErrorKind::kInvalid);
}

TEST_F(TlsUnauthenticatedTest, RejectsAnAuthenticatedPeerOfAnotherProtocol) {
  BarePeer peer(dial_raw(address_));
  drive_until([&] { return peer.shake_hands(); });
  peer.say(Bytes(kLaneHelloBytes, std::byte{'G'}));
  expect_refused(ErrorKind::kInvalid);
}

TEST_F(TlsUnauthenticatedTest, NotifiesAPeerOfAnotherVersionBeforeItCloses) {
  LaneHello answer;
  const auto peer = join({.lowest = 7, .highest = 9}, &answer);
  EXPECT_EQ(answer.highest, kProtocolHighest);
  expect_refused(ErrorKind::kUnsupported);
}

TEST_F(TlsUnauthenticatedTest, ClosesALaneOfAnUnknownChannel) {
  BarePeer peer(dial_raw(address_));
  drive_until([&] { return peer.shake_hands(); });
  LaneHello hello;
  hello.lane = 1;
  hello.token.fill(std::byte{0x5a});
  peer.greet(hello);
  drive_until([&] { return peer.sees_hang_up(); });
  EXPECT_TRUE(journal_.accepted.empty());
  EXPECT_TRUE(journal_.refused.empty()) << "it knows the secret: most likely it came late";
  expect_honest_peer_served();
}

TEST_F(TlsUnauthenticatedTest, AllocatesNothingForLengthsThatAnAuthenticatedPeerClaims) {
  for (const std::uint64_t claim : {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{1} << 50}) {
    for (const FrameType type : {FrameType::kMessage, FrameType::kStriped}) {
      TransportOptions options;
      options.allocator = [](std::size_t size) -> Buffer {
        EXPECT_LE(size, 100u);
        return allocate_buffer(size);
      };
      journal_ = {};
      start(options);
      const auto peer = join({.lanes = 1});
      const std::vector<Segment> segments = {{nullptr, claim, nullptr}};
      peer->say(FramePrefix({}, segments, type).bytes());
      expect_cut_off(ErrorKind::kInvalid, "max_message");
    }
  }
}

TEST_F(TlsUnauthenticatedTest, CutsOffAnAuthenticatedPeerWithInvalidPieces) {
  const Bytes whole(kPieceBytes);
  const auto piece = [&](std::uint64_t message, std::uint32_t index, BytesView bytes) {
    Bytes all(kPiecePrefixBytes);
    std::ranges::copy(piece_prefix(message, index), all.begin());
    all.insert(all.end(), bytes.begin(), bytes.end());
    return all;
  };
  Bytes twice = piece(0, 0, BytesView(whole).first(10));
  const Bytes again = piece(0, 0, {});
  twice.insert(twice.end(), again.begin(), again.end());
  Bytes no_piece = piece(0, 0, {});
  no_piece.back() = std::byte{1};
  for (const Bytes& bytes : {piece(0, 1, {}), piece(0, ~0u, {}), no_piece, twice}) {
    journal_ = {};
    start({});
    LaneHello answer;
    const auto first = join({.lanes = 1}, &answer);
    LaneHello second;
    second.lane = 1;
    second.token = answer.token;
    const auto lane = join(second);
    const std::vector<Segment> segments = {{nullptr, 10, nullptr}, {nullptr, 0, nullptr}};
    // Striped again, so that the first one's completion does not end the assembly.
    first->say(FramePrefix({}, segments, FrameType::kStriped).bytes());
    first->say(FramePrefix({}, segments, FrameType::kStriped).bytes());
    lane->say(bytes);
    expect_cut_off(ErrorKind::kInvalid, "cut off");
  }
}

TEST_F(TlsUnauthenticatedTest, CutsOffAnAuthenticatedPeerWhoseBytesWereChanged) {
  // A bare TLS session whose next record is damaged in transit.
  const Descriptor raw = dial_raw(address_);
  BarePeer peer{Descriptor(::dup(raw.get()))};
  drive_until([&] { return peer.shake_hands(); });
  peer.greet({});
  drive_until([&] { return !journal_.accepted.empty(); });
  Bytes record(kRecordOverhead + 64, std::byte{0x42});
  const std::uint32_t size = 64;
  std::memcpy(record.data(), &size, sizeof size);
  say(raw, record);
  expect_cut_off(ErrorKind::kInvalid, "it did not encrypt for this connection");
}

TEST_F(TlsUnauthenticatedTest, DistinguishesABrokenConnectionFromAGoodbye) {
  // An end without a goodbye inside TLS is a death, whichever side closed the TCP connection.
  { const auto peer = join({}); }
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("died or was killed"));
  const auto polite = join({});
  polite->say(goodbye_frame());
  drive_until([&] { return journal_.closed.size() == 2; });
  EXPECT_THAT(journal_.closed.at(1).message(), HasSubstr("closed the channel"));
}

}  // namespace
}  // namespace torchspan::net::tls_strangers_test
