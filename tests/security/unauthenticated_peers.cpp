#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <sys/resource.h>

#include "net/framing.h"
#include "net/handshake.h"
#include "net/local/shared_lane.h"
#include "net/stream/socket.h"
#include "net/tls/tls_links.h"
#include "net/tls/tls_session.h"
#include "rendezvous/messages/messages.h"
#include "tests/security/unauthenticated_attack.h"
#include "tests/support/environment.h"
#include "tests/support/fuzz_seeds.h"

/// Unauthenticated peers at every listener that they can reach. The listener is a separate process, so that
/// its memory and files can be counted.
namespace torchspan::net::conformance::unauthenticated_peers {
namespace {

/// Connections in an attack by peers that differ at random.
const int kSteps = torchspan::testing::number_from("TORCHSPAN_CASES", 400);

TEST_P(UnauthenticatedPeers, ThatSendNothingAreDisconnected) {
  AttackedListener listener(GetParam());
  under(listener, {.step =
                       [&] {
                         hold(listener.dial(), 200);
                         listener.executor().sleep(std::chrono::milliseconds(1));
                       },
                   .least = 300});
  EXPECT_GE(refused_, 150u);
}

TEST_P(UnauthenticatedPeers, ThatSendGarbageAreDisconnected) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  AttackedListener listener(GetParam());
  const Bytes opening = listener.opening();
  under(listener, {.step =
                       [&] {
                         Descriptor socket = listener.dial();
                         Bytes bytes = pattern(random() % 5 == 0 ? 200'000 : random() % 2000, random());
                         // Some start with valid bytes.
                         if (random() % 2 == 0)
                           std::copy_n(opening.begin(),
                                       std::min(opening.size(), random() % (bytes.size() + 1)),
                                       bytes.begin());
                         if (random() % 8 == 0) std::ranges::fill(bytes, std::byte{0});
                         if (socket) send_now(socket, bytes);
                         hold(std::move(socket), 60);
                       },
                   .least = kSteps});
  EXPECT_GE(refused_, static_cast<std::uint64_t>(kSteps) / 4);
}

TEST_P(UnauthenticatedPeers, WithAnotherSecretAreDenied) {
  AttackedListener listener(GetParam());
  struct Wrong : Handler {
    void on_accepted(const std::shared_ptr<Channel>&) override {}
    void on_message(const std::shared_ptr<Channel>&, Message) override {
      ADD_FAILURE() << "an unauthenticated peer got an answer";
    }
    void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override {
      denied += reason.kind() == ErrorKind::kDenied;
      ++closed;
    }
    int denied = 0, closed = 0;
  };
  Wrong wrong;
  TransportOptions options;
  options.secret = Secret::from_bytes(bytes_of("the secret of another job"));
  const auto transport = listener.make_transport(wrong, options);
  int dialled = 0;
  const auto drive = [&](int most) {
    while (dialled - wrong.closed > most) {
      if (!transport->poll()) transport->wait(listener.executor().deadline_in(std::chrono::milliseconds(10)));
    }
  };
  under(listener, {.step =
                       [&] {
                         const auto channel = transport->connect(
                             listener.address(), listener.executor().deadline_in(std::chrono::seconds(20)));
                         ++dialled;
                         try {
                           channel->send(Bytes(100), {});
                         } catch (const Error&) {
                         }
                         drive(5);
                       },
                   .least = 150});
  drive(0);
  EXPECT_GE(denied_, 125u);
  EXPECT_GE(wrong.denied, 125);
}

/// Relays between an honest dialer and the victim, and copies what the dialer sends.
Bytes record_honest_call(AttackedListener& listener) {
  const std::string place = listener.other_address("relay");
  const ListeningSocket fake_listener(listener.parsed(place));
  std::atomic<bool> done{false};
  Bytes recorded;
  Thread relay = listener.executor().spawn("relay", [&] {
    Descriptor near, far = listener.dial();
    const auto pass = [](const Descriptor& from, const Descriptor& to, Bytes* record) {
      std::byte bytes[16384];
      const ssize_t got = ::recv(from.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got <= 0) return;
      if (record != nullptr) record->insert(record->end(), bytes, bytes + got);
      for (ssize_t sent = 0; sent < got;) {
        const ssize_t part =
            ::send(to.get(), bytes + sent, static_cast<std::size_t>(got - sent), MSG_NOSIGNAL);
        if (part > 0) sent += part;
      }
    };
    while (!done) {
      if (!near) near.reset(::accept4(fake_listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (near) {
        pass(near, far, &recorded);
        pass(far, near, nullptr);
      }
      listener.executor().sleep(std::chrono::microseconds(100));
    }
  });
  {
    const auto dialer = listener.make_honest(place);
    EXPECT_TRUE(dialer && dialer->exchange());
  }
  done = true;
  relay.join();
  return recorded;
}

TEST_P(UnauthenticatedPeers, ThatReplayAConnectionAreRejected) {
  AttackedListener listener(GetParam());
  const Bytes recorded = record_honest_call(listener);
  ASSERT_GT(recorded.size(), 80u);
  under(listener, {.step =
                       [&] {
                         Descriptor socket = listener.dial();
                         if (socket) send_now(socket, recorded);
                         hold(std::move(socket), 40);
                         // More than the listener can answer would test the processor, not the proofs.
                         listener.executor().sleep(std::chrono::milliseconds(3));
                       },
                   .least = 150});
  EXPECT_GE(refused_, 90u);
}

TEST_P(UnauthenticatedPeers, AreRejectedInAFlood) {
  // Six thousand are more than the 4096 that the system queues for a listener. The two kinds of sockets are enough.
  const bool is_long = GetParam().name == "Unix" || GetParam().name == "Tcp";
  const int many = torchspan::testing::number_from("TORCHSPAN_CASES", is_long ? 6'000 : 1000);
  rlimit limit{}, raised{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  raised = {limit.rlim_max, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &raised), 0);
  const std::size_t most = std::min<rlim_t>(limit.rlim_max, static_cast<rlim_t>(many) + 500) - 400;
  AttackedListener listener(GetParam());
  int dialled = 0;
  under(listener, {.step =
                       [&] {
                         Descriptor socket = listener.dial();
                         // The system accepts no more connections for now.
                         if (!socket) return listener.executor().sleep(std::chrono::milliseconds(1));
                         ++dialled;
                         hold(std::move(socket), most);
                         if (dialled >= many) listener.executor().sleep(std::chrono::milliseconds(1));
                       },
                   .least = many,
                   .pace = Duration::zero()});
  EXPECT_GE(dialled, many / 2);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_P(UnauthenticatedPeers, ThatSendTheirHandshakeSlowlyAreDisconnected) {
  AttackedListener listener(GetParam());
  const Bytes opening = listener.opening();
  struct SlowSender {
    Descriptor socket;
    std::size_t said = 0;
  };
  std::vector<SlowSender> senders(40);
  int hung_up_on = 0;
  under(listener, {.step =
                       [&] {
                         for (SlowSender& sender : senders) {
                           if (sender.socket && hung_up(sender.socket)) {
                             ++hung_up_on;
                             sender.socket.reset();
                           }
                           if (!sender.socket) sender = {listener.dial()};
                           // The last byte is never sent.
                           if (sender.socket && sender.said + 1 < opening.size())
                             send_now(sender.socket, BytesView(opening).subspan(sender.said++, 1));
                         }
                         listener.executor().sleep(std::chrono::milliseconds(2));
                         if (hung_up_on >= 80) senders.clear();
                       },
                   .least = 200,
                   .done = [&] { return hung_up_on >= 80; }});
  EXPECT_GE(hung_up_on, 80);
}

TEST_P(UnauthenticatedPeers, ThatLeaveDuringTheHandshakeAreForgotten) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  AttackedListener listener(GetParam());
  const Bytes opening = listener.opening();
  under(listener, {.step =
                       [&] {
                         Descriptor socket = listener.dial();
                         if (!socket) return;
                         send_now(socket, BytesView(opening).first(random() % (opening.size() + 1)));
                         const linger at_once{1, 0};
                         if (random() % 2 == 0)
                           ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
                         if (random() % 2 == 0)
                           ::shutdown(socket.get(), random() % 2 == 0 ? SHUT_WR : SHUT_RD);
                         hold(std::move(socket), random() % 100);
                       },
                   .least = kSteps});
  EXPECT_GE(refused_, static_cast<std::uint64_t>(kSteps) / 6);
}

/// Messages that claim to be endless where a frame or a proof is expected.
std::vector<Bytes> endless_claims() {
  std::vector<Bytes> claims;
  for (const std::uint64_t size : {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{1} << 62}) {
    const std::vector<Segment> segments = {{nullptr, size, nullptr}};
    claims.push_back(torchspan::testing::joined({FramePrefix({}, segments).bytes()}));
    // The same as the header's size, and the largest number of segments.
    Bytes header = claims.back(), many = claims.back();
    std::memcpy(header.data() + 8, &size, sizeof size);
    std::memset(many.data() + 4, 0xff, 4);
    claims.push_back(header);
    claims.push_back(many);
  }
  return claims;
}

TEST_P(UnauthenticatedPeers, ThatClaimHugeLengthsGetNoMemory) {
  AttackedListener listener(GetParam());
  const Bytes opening = listener.opening();
  const std::vector<Bytes> claims = endless_claims();
  std::size_t next = 0;
  under(listener, {.step =
                       [&] {
                         Descriptor socket = listener.dial();
                         if (!socket) return;
                         const Bytes& claim = claims[next++ % claims.size()];
                         if (next % 2 == 0) send_now(socket, opening);
                         send_now(socket, claim);
                         send_now(socket, Bytes(100'000));
                         hold(std::move(socket), 50);
                       },
                   .least = 400});
  EXPECT_GE(refused_, 120u);
}

enum class ClaimOutcome : std::uint8_t { kRejected, kCutOff, kKept };

/// The store says goodbye to a member and waits for its answer before it closes the connection.
// clang 14 cannot read libstdc++'s std::ranges::search.
bool says_goodbye(const Bytes& heard) {
  const auto goodbye = goodbye_frame();
  return std::search(heard.begin(), heard.end(), goodbye.begin(), goodbye.end()) != heard.end();
}

/// Waits until `ended` returns true.
ClaimOutcome wait_for_cut(AttackedListener& listener, const std::function<bool()>& ended) {
  const Deadline deadline = listener.executor().deadline_in(std::chrono::seconds(20));
  while (!ended()) {
    if (deadline.passed(listener.executor().now())) return ClaimOutcome::kKept;
    listener.executor().sleep(std::chrono::microseconds(100));
  }
  return ClaimOutcome::kCutOff;
}

ClaimOutcome send_claim_over_tls(AttackedListener& listener, Descriptor socket, BytesView bytes) {
  TlsSession session(std::make_shared<const TlsContext>(common_secret(), listener.tls_options(true)),
                     std::move(socket),
                     TlsSession::Start{.role = Role::kDialer, .peer = "victim", .host = "127.0.0.1"});
  while (!session.shake_hands()) listener.executor().sleep(std::chrono::microseconds(100));
  Bytes heard;
  const auto ended = [&] {
    Bytes room(4096);
    const iovec place{room.data(), room.size()};
    const TlsSession::Got got = session.read({&place, 1});
    heard.insert(heard.end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(got.size));
    return got.ended || got.broken != 0 || says_goodbye(heard);
  };
  // The answer shows that it is accepted.
  TlsGreeting greeting(Role::kDialer, "victim");
  greeting.say(session, {});
  if (wait_for_cut(listener, [&] { return greeting.hear(session, {}).has_value(); }) == ClaimOutcome::kKept)
    return ClaimOutcome::kRejected;
  session.trust();
  const iovec place{const_cast<std::byte*>(bytes.data()), bytes.size()};
  session.write({&place, 1});
  return wait_for_cut(listener, ended);
}

/// A peer that proves the secret by hand and then sends `bytes`.
ClaimOutcome send_claim(AttackedListener& listener, BytesView bytes) {
  Descriptor socket = listener.dial();
  if (!socket) return ClaimOutcome::kRejected;
  try {
    if (listener.is_tls()) return send_claim_over_tls(listener, std::move(socket), bytes);
    HandshakeOptions options{.secret = common_secret(), .peer = "victim"};
    draw_nonce(options.nonce);
    Handshake handshake(Role::kDialer, options);
    while (!handshake.done()) {
      send_now(socket, handshake.take_output());
      Bytes heard(4096);
      const ssize_t got = ::recv(socket.get(), heard.data(), heard.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return ClaimOutcome::kRejected;
      if (got > 0) handshake.receive(BytesView(heard).first(static_cast<std::size_t>(got)));
      if (got < 0) listener.executor().sleep(std::chrono::microseconds(100));
    }
  } catch (const Error&) {
    return ClaimOutcome::kRejected;
  }
  send_now(socket, bytes);
  Bytes heard;
  return wait_for_cut(listener, [&] {
    Bytes room(4096);
    const ssize_t got = ::recv(socket.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (got > 0) heard.insert(heard.end(), room.begin(), room.begin() + got);
    return got == 0 || (got < 0 && errno != EAGAIN) || says_goodbye(heard);
  });
}

/// Messages that no worker sends to the store: lists and texts that claim more than they contain.
std::vector<Bytes> endless_messages() {
  std::vector<Bytes> frames;
  rendezvous::Register entry;
  entry.member.name = "worker1";
  entry.functions = {"f()"};
  const Bytes whole = rendezvous::encode_message(entry);
  // After the type and the versions: nothing else is read without a common one. At least one byte is missing.
  for (std::size_t at = 6; at + 4 < whole.size(); ++at) {
    Bytes message = whole;
    std::memset(message.data() + at, 0xff, 4);
    message.resize(at + 4);
    frames.push_back(torchspan::testing::joined({FramePrefix(message, {}).bytes(), message}));
  }
  return frames;
}

TEST_P(UnauthenticatedPeers, WithTheSecretThatClaimHugeLengthsAreCutOff) {
  AttackedListener listener(GetParam());
  std::vector<Bytes> claims = endless_claims();
  if (GetParam().store) {
    for (Bytes& one : endless_messages()) claims.push_back(std::move(one));
  }
  std::size_t next = 0;
  std::uint64_t admitted = 0;
  under(listener, {.step =
                       [&] {
                         const ClaimOutcome outcome = send_claim(listener, claims[next % claims.size()]);
                         EXPECT_NE(outcome, ClaimOutcome::kKept) << "claim " << next % claims.size();
                         if (outcome == ClaimOutcome::kRejected) return;
                         ++admitted;
                         ++next;
                       },
                   .done = [&] { return next > claims.size(); },
                   .admitted = [&] { return admitted; }});
  EXPECT_GT(next, claims.size()) << "not every claim was made";
}

TEST_P(UnauthenticatedPeers, ThatPassDescriptorsLeaveNone) {
  if (!GetParam().unix_socket) GTEST_SKIP() << "only Unix sockets pass descriptors";
  AttackedListener listener(GetParam());
  const Bytes opening = listener.opening();
  under(listener, {.step =
                       [&] {
                         Descriptor socket = listener.dial();
                         if (!socket) return;
                         for (std::size_t at = 0; at + 8 <= opening.size(); at += 8) {
                           send_note(socket.get(), BytesView(opening).subspan(at, 8), 0);
                         }
                         hold(std::move(socket), 50);
                       },
                   .least = 400});
  EXPECT_GE(refused_, 120u);
}

TEST_P(UnauthenticatedPeers, ThatExhaustDescriptorsDoNotMakeItSpin) {
  constexpr int kDescriptors = 64;
  AttackedListener listener(GetParam(), kDescriptors);
  const auto early = listener.make_honest();
  ASSERT_TRUE(early);
  const Counts before = listener.counts();
  const Duration used_before = listener.cpu_time();
  const TimePoint began = listener.executor().now();
  std::uint64_t rounds = 0;
  // Faster than the listener closes silent connections.
  for (int i = 0; i < 4 * kDescriptors && listener.counts().overloaded == before.overloaded; ++i)
    hold(listener.dial(), 200);
  while (listener.executor().now() - began < std::chrono::milliseconds(700) || rounds < 25) {
    hold(listener.dial(), 200);
    EXPECT_TRUE(early->exchange());
    ++rounds;
    listener.executor().sleep(std::chrono::milliseconds(5));
  }
  const auto elapsed = listener.executor().now() - began;
  const Counts after = listener.counts();
  EXPECT_GT(rounds, 20u);
  EXPECT_GT(after.overloaded, before.overloaded) << "descriptors never ran out";
  EXPECT_LE(after.overloaded - before.overloaded,
            static_cast<std::uint64_t>(elapsed / std::chrono::milliseconds(100)) + 2)
      << "each pause is reported once, and lasts";
  EXPECT_TRUE(!kMemoryIsMeasurable || listener.cpu_time() - used_before < elapsed / 2) << "it spins";
  held_.clear();
  const auto late = listener.make_honest();
  EXPECT_TRUE(late && late->exchange());
  EXPECT_TRUE(early->exchange());
}

const ListenerKind kUnixListener{"Unix", "stream", false, true};
const ListenerKind kLocalListener{"Local", "local", false, true};
const ListenerKind kTcpListener{"Tcp", "stream"};
const ListenerKind kTlsListener{"TlsSecret", "tls"};
const ListenerKind kTlsCertificateListener{"TlsCertificate", "tls", false, false, true};
const ListenerKind kStoreUnixListener{"StoreUnix", "stream", true, true};
const ListenerKind kStoreTcpListener{"StoreTcp", "stream", true};
const ListenerKind kStoreTlsListener{"StoreTlsSecret", "tls", true};
const ListenerKind kStoreTlsCertificateListener{"StoreTlsCertificate", "tls", true, false, true};

INSTANTIATE_TEST_SUITE_P(Doors, UnauthenticatedPeers,
                         ::testing::Values(kUnixListener, kLocalListener, kTcpListener, kTlsListener,
                                           kTlsCertificateListener, kStoreUnixListener, kStoreTcpListener,
                                           kStoreTlsListener, kStoreTlsCertificateListener),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace torchspan::net::conformance::unauthenticated_peers
