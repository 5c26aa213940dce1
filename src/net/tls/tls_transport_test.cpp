#include <array>
#include <atomic>
#include <ctime>
#include <gmock/gmock.h>
#include <random>
#include <sys/time.h>

#include "net/tls/pieces.h"
#include "net/tls/tls_test_tools.h"
#include "tests/support/certificates.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::net::tls_transport_test {
/// Seconds by which this process's clock is ahead, for OpenSSL.
std::atomic<std::time_t> clock_ahead{0};
}  // namespace torchspan::net::tls_transport_test

/// In place of libc's functions; OpenSSL uses one or the other.
extern "C" std::time_t time(std::time_t* copy) noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  now.tv_sec += torchspan::net::tls_transport_test::clock_ahead;
  if (copy != nullptr) *copy = now.tv_sec;
  return now.tv_sec;
}
extern "C" int gettimeofday(timeval* copy, void*) noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  *copy = {.tv_sec = now.tv_sec + torchspan::net::tls_transport_test::clock_ahead,
           .tv_usec = now.tv_nsec / 1000};
  return 0;
}

/// What only the TLS transport has: names, lanes, heartbeats, certificates, keys that are renewed. Everything
/// else is in tests/conformance.
namespace torchspan::net::tls_transport_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::TemporaryFolder;
using torchspan::testing::TestAuthority;

class TlsTransportTest : public TlsTest {
 protected:
  TlsTransportTest() { start({}); }

  Error end_of_dial(const std::string& text) {
    journal_.closed.clear();
    transport_->connect(text, Deadline::never());
    drive_until([&] { return !journal_.closed.empty(); });
    return journal_.closed.at(0);
  }
  /// Lets the transport dial a bare listener, which proves the secret and answers the greeting.
  std::unique_ptr<BarePeer> be_dialed(std::shared_ptr<Channel>& channel) {
    ListeningSocket listening_socket(*numeric_address(parse_tls_address("tls:127.0.0.1:0")));
    channel =
        transport_->connect(with_port(parse_tls_address(address_), listening_socket.address().port), {});
    transport_->poll();
    Descriptor socket(::accept4(listening_socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    auto peer = std::make_unique<BarePeer>(std::move(socket), Role::kListener);
    drive_until([&] { return peer->shake_hands(); });
    drive_until([&] { return peer->hears_greeting(); });
    peer->greet({});
    return peer;
  }
};

TEST_F(TlsTransportTest, NeedsASecretOrCertificates) {
  const auto make = [&](const TlsOptions& tls, bool secret) {
    return error_of([&] {
      TransportOptions options;
      if (secret) options.secret = test_secret();
      make_tls_transport(*executor_, journal_, options, tls);
    });
  };
  EXPECT_THAT(make({}, false).message(), HasSubstr("TransportOptions::secret"));
  EXPECT_THAT(make({.certificate_file = "certificate.pem"}, true).message(), HasSubstr("key_file"));
  EXPECT_THAT(make({.key_file = "key.pem"}, true).message(), HasSubstr("certificate_file"));
  EXPECT_THAT(make({.check_names = true}, true).message(), HasSubstr("check_names"));
  EXPECT_THAT(make({.lanes = 17}, true).message(), HasSubstr("lanes"));
  EXPECT_THAT(make({.dead_after = std::chrono::milliseconds(300)}, true).message(), HasSubstr("dead_after"));
  const TlsOptions missing{
      .certificate_file = "/nowhere/c.pem", .key_file = "/nowhere/k.pem", .authority_file = "/nowhere/a.pem"};
  EXPECT_THAT(make(missing, true).message(), HasSubstr("'/nowhere/c.pem'"));
}

TEST_F(TlsTransportTest, ReadsAddresses) {
  for (const char* wrong :
       {"tls:", "tls:host", "tls:host:", "tls::80", "tls:host:65536", "tls:host:12x", "tls:::1:80",
        "tls:[::1:80", "tls:[name]:80", "tls:a b:80", "tls:a/b:80", "tcp:127.0.0.1:80"}) {
    SCOPED_TRACE(wrong);
    EXPECT_FALSE(transport_->can_reach(wrong));
    EXPECT_EQ(error_of([&] { transport_->connect(wrong, {}); }).kind(), ErrorKind::kInvalid);
    EXPECT_EQ(error_of([&] { transport_->listen(wrong); }).kind(), ErrorKind::kInvalid);
  }
  for (const char* right :
       {"tls:10.0.0.1:80", "tls:[::1]:80", "tls:[2001:db8::7]:1", "tls:worker-3.job.local:29500"}) {
    EXPECT_TRUE(transport_->can_reach(right)) << right;
  }
}

TEST_F(TlsTransportTest, SpeaksOverIpv6AndToNames) {
  for (const char* place : {"tls:[::1]:0", "tls:localhost:0"}) {
    SCOPED_TRACE(place);
    const std::string bound = transport_->listen(place);
    EXPECT_THAT(bound, ::testing::StartsWith(std::string(place).substr(0, std::string(place).rfind(':'))));
    const std::size_t before = journal_.received.size();
    transport_->connect(bound, Deadline::never())->send(Bytes(3), {});
    drive_until([&] { return journal_.received.size() == before + 1; });
  }
}

TEST_F(TlsTransportTest, NamesAPortThatIsInUse) {
  const Error error = error_of([&] { transport_->listen(address_); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), HasSubstr("'" + address_ + "'"));
}

TEST_F(TlsTransportTest, ListensWithinTheGivenPorts) {
  const auto taken = parse_tls_address(address_).port;
  const auto listen = [&](PortRange ports, const std::string& place) {
    return make_tls_transport(*executor_, journal_, {.secret = test_secret()}, {.ports = ports})
        ->listen(place);
  };
  const PortRange several{.first = taken, .last = static_cast<std::uint16_t>(std::min(taken + 50, 65535))};
  const auto port = parse_tls_address(listen(several, "tls:127.0.0.1:0")).port;
  EXPECT_GT(port, taken);
  EXPECT_LE(port, several.last);
  EXPECT_EQ(parse_tls_address(listen({.first = taken, .last = taken}, "tls:[::1]:0")).port, taken);
  const Error error = error_of([&] { listen({.first = taken, .last = taken}, "tls:127.0.0.1:0"); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), AllOf(HasSubstr("TORCHSPAN_PORT_RANGE"), HasSubstr(std::to_string(taken))));
  for (const PortRange wrong : {PortRange{5, 4}, PortRange{0, 4}}) {
    EXPECT_EQ(error_of([&] { listen(wrong, "tls:127.0.0.1:0"); }).kind(), ErrorKind::kInvalid);
  }
}

TEST_F(TlsTransportTest, ReportsAnUnknownName) {
  // A label of 70 letters is invalid, so the resolver rejects the name without a query.
  const std::string name(70, 'x');
  const Error error = end_of_dial("tls:" + name + ":80");
  EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.message();
  EXPECT_THAT(error.message(), HasSubstr("getent hosts '" + name + "'"));
}

TEST_F(TlsTransportTest, StripesLargeMessagesOverTheLanes) {
  BarePeer first(dial_raw(address_));
  drive_until([&] { return first.shake_hands(); });
  first.greet({.lanes = 1});
  drive_until([&] { return first.hears_greeting(); });
  LaneHello hello = first.answer();
  EXPECT_EQ(hello.lanes, 1);
  BarePeer lane(dial_raw(address_));
  drive_until([&] { return lane.shake_hands(); });
  hello.lane = 1;
  lane.greet(hello);
  drive_until([&] { return lane.hears_greeting(); });

  const Bytes header(20, std::byte{'h'}), small(kWorthStriping - 1, std::byte{'s'});
  Bytes large(kPieceBytes * 4 + 100);
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<std::byte>(i * 7 >> 3);
  const Segment striped[] = {{large.data(), 1000, nullptr},
                             {large.data() + 1000, large.size() - 1000, nullptr}};
  const Segment whole[] = {{small.data(), small.size(), nullptr}};
  journal_.accepted.at(0)->send(header, striped);
  journal_.accepted.at(0)->send({}, whole);

  const std::size_t announced = kPrefixBytes + 16 + header.size();
  drive_until([&] { return first.receives(announced + kPrefixBytes + 8 + small.size()); });
  const FramePrefix prefix(header, striped, FrameType::kStriped);
  EXPECT_THAT(first.take(kPrefixBytes + 16), ::testing::ElementsAreArray(prefix.bytes()));
  EXPECT_EQ(first.take(header.size()), header);
  drive_until([&] { return lane.receives(large.size() + 5 * kPiecePrefixBytes); });
  for (std::uint32_t index = 0; index < 5; ++index) {
    const std::size_t at = index * kPieceBytes, size = std::min(kPieceBytes, large.size() - at);
    EXPECT_THAT(lane.take(kPiecePrefixBytes), ::testing::ElementsAreArray(piece_prefix(0, index)));
    EXPECT_TRUE(std::ranges::equal(lane.take(size), BytesView(large).subspan(at, size)));
  }

  // The reverse direction: the pieces arrive before the frame that they belong to, with a small message in
  // between.
  lane.say(piece_prefix(0, 4));
  for (std::size_t at = 4 * kPieceBytes; at < large.size(); at += 50)
    lane.say(BytesView(large).subspan(at, 50));
  for (std::uint32_t index = 0; index < 4; ++index) {
    lane.say(piece_prefix(0, index));
    for (std::size_t at = 0; at < kPieceBytes; at += 16384) {
      lane.say(BytesView(large).subspan(index * kPieceBytes + at, 16384));
    }
    for (int i = 0; i < 5; ++i) transport_->poll();
  }
  EXPECT_TRUE(journal_.received.empty());
  first.say(prefix.bytes());
  first.say(header);
  first.say(FramePrefix(header, {}).bytes());
  first.say(header);
  drive_until([&] { return journal_.received.size() == 2; });
  ASSERT_EQ(journal_.received.at(0).segments.size(), 2u);
  const Buffer& rest = journal_.received.at(0).segments.at(1);
  EXPECT_TRUE(std::ranges::equal(BytesView(rest.data, rest.size), BytesView(large).subspan(1000)));
  EXPECT_TRUE(journal_.received.at(1).segments.empty());
  EXPECT_TRUE(journal_.closed.empty());
}

TEST_F(TlsTransportTest, EndsAChannelThatLostALane) {
  TransportOptions options;
  options.linger = std::chrono::milliseconds(50);
  start(options);
  BarePeer first(dial_raw(address_));
  drive_until([&] { return first.shake_hands(); });
  first.greet({.lanes = 1});
  drive_until([&] { return first.hears_greeting(); });
  LaneHello hello = first.answer();
  hello.lane = 1;
  {
    BarePeer lane(dial_raw(address_));
    drive_until([&] { return lane.shake_hands(); });
    lane.greet(hello);
    drive_until([&] { return lane.hears_greeting(); });
  }
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("one of its connections"));
}

/// The system's executor; its pollers watch no more than they do already while `full` is set.
class FullPollers final : public Executor {
 public:
  explicit FullPollers(Executor& real) : real_(real) {}
  TimePoint now() const override { return real_.now(); }
  std::unique_ptr<Parker> make_parker() override { return real_.make_parker(); }
  std::unique_ptr<Poller> make_poller() override {
    return std::make_unique<FullPoller>(real_.make_poller(), full);
  }
  Thread spawn(std::string name, std::function<void()> body) override {
    return real_.spawn(std::move(name), std::move(body));
  }
  void yield() override { real_.yield(); }
  Duration spin_limit() const override { return real_.spin_limit(); }

  bool full = false;

 private:
  class FullPoller final : public Poller {
   public:
    FullPoller(std::unique_ptr<Poller> real, const bool& full) : real_(std::move(real)), full_(full) {}
    void add(int fd, std::uint64_t token, bool writable) override {
      check();
      real_->add(fd, token, writable);
    }
    void change(int fd, std::uint64_t token, bool writable) override {
      check();
      real_->change(fd, token, writable);
    }
    void remove(int fd) override { real_->remove(fd); }
    std::size_t wait(std::span<Event> events, Deadline deadline) override {
      return real_->wait(events, deadline);
    }
    void wake() override { real_->wake(); }
    int descriptor() const override { return real_->descriptor(); }

   private:
    void check() const {
      if (full_) throw Error(ErrorKind::kOverloaded, "no room to watch a descriptor");
    }
    const std::unique_ptr<Poller> real_;
    const bool& full_;
  };

  Executor& real_;
};

TEST_F(TlsTransportTest, EndsAChannelWhoseSocketTheSystemCannotWatch) {
  FullPollers executor(*executor_);
  TransportOptions options;
  options.secret = test_secret();
  transport_ = make_tls_transport(executor, journal_, std::move(options), {});
  address_ = transport_->listen("tls:127.0.0.1:0");
  std::shared_ptr<Channel> channel;
  const auto peer = be_dialed(channel);
  drive_until([&] { return channel->opened(); });
  executor.full = true;
  const Bytes segment(1 << 20);
  while (channel->unsent_bytes() == 0)
    channel->send({}, std::array{Segment{segment.data(), segment.size(), nullptr}});
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_EQ(journal_.closed.at(0).message(), "no room to watch a descriptor");
  EXPECT_EQ(error_of([&] { channel->send({}, {}); }).kind(), ErrorKind::kDisconnected);
  transport_.reset();
}

TEST_F(TlsTransportTest, EndsAChannelWhosePeerIsSilent) {
  start({}, {.heartbeat = std::chrono::milliseconds(50), .dead_after = std::chrono::seconds(1)});
  const TimePoint start = executor_->now();
  std::shared_ptr<Channel> channel;
  const auto peer = be_dialed(channel);
  channel->send(Bytes(8), {});
  drive_until([&] { return peer->receives(kPrefixBytes + 8); });
  drive_until([&] {
    peer->receives(0);
    return !journal_.closed.empty();
  });
  EXPECT_GE(executor_->now() - start, std::chrono::seconds(1));
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("silent for 1.0 s"));
  EXPECT_EQ(journal_.closed.at(0).elapsed(), std::chrono::seconds(1));
  // This side sent heartbeats all the time.
  peer->take(kPrefixBytes + 8);
  ASSERT_TRUE(peer->receives(3 * kPrefixBytes));
  EXPECT_THAT(peer->take(kPrefixBytes), ::testing::ElementsAreArray(heartbeat_frame()));
  EXPECT_EQ(error_of([&] { channel->send({}, {}); }).kind(), ErrorKind::kDisconnected);
}

TEST_F(TlsTransportTest, KeepsAnIdleChannelAndOneWithoutMessagesInOneDirection) {
  start({}, {.heartbeat = std::chrono::milliseconds(50), .dead_after = std::chrono::milliseconds(500)});
  const auto idle = transport_->connect(address_, Deadline::never());
  const auto busy = transport_->connect(address_, Deadline::never());
  const Deadline later = executor_->deadline_in(std::chrono::milliseconds(1100));
  drive_until([&] {
    if (busy->unsent_bytes() == 0) busy->send(Bytes(1000), {});
    return later.passed(executor_->now());
  });
  EXPECT_TRUE(journal_.closed.empty());
}

TEST_F(TlsTransportTest, DoesNotDeclareAPeerDeadBecauseTheTransportWasNotPolled) {
  start({}, {.heartbeat = std::chrono::milliseconds(50), .dead_after = std::chrono::milliseconds(200)});
  std::shared_ptr<Channel> channel;
  const auto peer = be_dialed(channel);
  drive_until([&] { return peer->receives(kPrefixBytes); });
  executor_->sleep(std::chrono::milliseconds(400));
  peer->say(heartbeat_frame());
  transport_->poll();
  transport_->poll();
  EXPECT_TRUE(journal_.closed.empty());
}

TEST_F(TlsTransportTest, ChecksNamesInCertificatesWhenAsked) {
  const TemporaryFolder folder;
  const TestAuthority authority(folder.path(), "authority");
  authority.issue("right", "DNS:localhost,IP:127.0.0.1");
  authority.issue("wrong", "DNS:elsewhere.example");
  const auto options = [&](const std::string& who, bool check) {
    return TlsOptions{.certificate_file = authority.certificate_file(who),
                      .key_file = authority.key_file(who),
                      .authority_file = authority.authority_file(),
                      .check_names = check};
  };
  for (const bool check : {false, true}) {
    for (const char* who : {"right", "wrong"}) {
      for (const char* place : {"tls:127.0.0.1:0", "tls:localhost:0"}) {
        SCOPED_TRACE(::testing::Message() << who << " at " << place << (check ? ", checked" : ""));
        journal_ = {};
        transport_ = make_tls_transport(*executor_, journal_, {}, options(who, check));
        const std::string bound = transport_->listen(place);
        transport_->connect(bound, Deadline::never());
        drive_until([&] { return !journal_.accepted.empty() || !journal_.closed.empty(); });
        EXPECT_EQ(journal_.closed.empty(), !check || who == std::string("right"));
        for (const Error& reason : journal_.closed) EXPECT_EQ(reason.kind(), ErrorKind::kDenied);
      }
    }
  }
}

TEST_F(TlsTransportTest, SaysThatTheClocksOfTheHostsMayDifferIfACertificateIsNotValidNow) {
  constexpr long kYear = 365L * 24 * 3600;
  const TemporaryFolder folder;
  const TestAuthority authority(folder.path(), "authority");
  authority.issue("now", "IP:127.0.0.1");
  authority.issue("past", "IP:127.0.0.1", -3 * kYear, -2 * kYear);
  authority.issue("future", "IP:127.0.0.1", 2 * kYear, 3 * kYear);
  const auto options = [&](const std::string& when) {
    return TlsOptions{.certificate_file = authority.certificate_file(when),
                      .key_file = authority.key_file(when),
                      .authority_file = authority.authority_file()};
  };
  for (const char* when : {"past", "future"}) {
    for (const bool wrong_dialer : {false, true}) {
      SCOPED_TRACE(::testing::Message() << when << (wrong_dialer ? ", dialer" : ", listener"));
      journal_ = {};
      transport_ = make_tls_transport(*executor_, journal_, {}, options(wrong_dialer ? "now" : when));
      TlsJournal theirs;
      const auto dialer = make_tls_transport(*executor_, theirs, {}, options(wrong_dialer ? when : "now"));
      dialer->connect(transport_->listen("tls:127.0.0.1:0"), Deadline::never());
      drive_until([&] {
        dialer->poll();
        return !journal_.refused.empty() && !theirs.closed.empty();
      });
      for (const Error& error : {journal_.refused.at(0), theirs.closed.at(0)}) {
        EXPECT_EQ(error.kind(), ErrorKind::kDenied) << error.message();
        EXPECT_THAT(error.message(), AllOf(HasSubstr("date -u"), HasSubstr("-dates")));
      }
      const Error& judge = wrong_dialer ? journal_.refused.at(0) : theirs.closed.at(0);
      EXPECT_THAT(judge.message(),
                  HasSubstr(when == std::string("past") ? "has expired" : "is not yet valid"));
    }
  }
}

TEST_F(TlsTransportTest, SaysIfTheNameOfAnotherHostMeansThisOne) {
  const TlsPlace name = parse_tls_address("tls:node7:80");
  const auto at = [](const char* text) { return *numeric_address(parse_tls_address(text)); };
  for (const char* loopback : {"tls:127.0.1.1:80", "tls:[::1]:80"}) {
    EXPECT_THAT(loopback_hint(name, at(loopback)), AllOf(HasSubstr("'node7'"), HasSubstr("/etc/hosts")));
    EXPECT_EQ(loopback_hint(parse_tls_address(loopback), at(loopback)), "");
    EXPECT_EQ(loopback_hint(parse_tls_address("tls:localhost:80"), at(loopback)), "");
  }
  EXPECT_EQ(loopback_hint(name, at("tls:10.0.0.7:80")), "");
  EXPECT_THAT(loopback_hint(name, at("tls:127.0.1.1:80")), HasSubstr("127.0.1.1, which"));
}

TEST_F(TlsTransportTest, RejectsAPeerThatEncryptsOtherwiseInBothDirections) {
  for (const TcpNetwork mine : {TcpNetwork::kEncrypted, TcpNetwork::kIsolated}) {
    const bool encrypts = mine == TcpNetwork::kEncrypted;
    SCOPED_TRACE(encrypts ? "the listener encrypts" : "the dialer encrypts");
    journal_ = {};
    start({}, {.network = mine});
    TlsJournal theirs;
    TransportOptions options;
    options.secret = test_secret();
    const auto dialer = make_tls_transport(
        *executor_, theirs, options, {.network = encrypts ? TcpNetwork::kIsolated : TcpNetwork::kEncrypted});
    dialer->connect(address_, Deadline::never())->send(Bytes(8), {});
    drive_until([&] {
      dialer->poll();
      return !journal_.refused.empty() && !theirs.closed.empty();
    });
    for (const Error& error : {journal_.refused.at(0), theirs.closed.at(0)}) {
      EXPECT_EQ(error.kind(), ErrorKind::kDenied);
      EXPECT_THAT(error.message(), AllOf(HasSubstr("tcp-isolated (no encryption)"),
                                         HasSubstr("tls (encryption)"), HasSubstr("TORCHSPAN_NETWORK")));
    }
    EXPECT_TRUE(journal_.accepted.empty());
    EXPECT_TRUE(journal_.received.empty());
  }
}

TEST_F(TlsTransportTest, ShowsItsMessagesOnTheNetworkOnlyIfThatIsDeclaredIsolated) {
  const std::string text = "what an observer of the network looks for";
  const Bytes header(reinterpret_cast<const std::byte*>(text.data()),
                     reinterpret_cast<const std::byte*>(text.data()) + text.size());
  for (const TcpNetwork network : {TcpNetwork::kEncrypted, TcpNetwork::kIsolated}) {
    journal_ = {};
    start({}, {.network = network});
    ListeningSocket between(*numeric_address(parse_tls_address("tls:127.0.0.1:0")));
    TlsJournal theirs;
    TransportOptions options;
    options.secret = test_secret();
    const auto dialer = make_tls_transport(*executor_, theirs, options, {.network = network, .lanes = 0});
    dialer->connect(with_port(parse_tls_address(address_), between.address().port), Deadline::never())
        ->send(header, {});
    dialer->poll();
    Descriptor near(::accept4(between.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const Descriptor far = dial_raw(address_);
    Bytes seen;
    drive_until([&] {
      dialer->poll();
      forward(near, far, &seen);
      forward(far, near, nullptr);
      return !journal_.received.empty();
    });
    EXPECT_EQ(journal_.received.at(0).header, header);
    const bool visible = std::search(seen.begin(), seen.end(), header.begin(), header.end()) != seen.end();
    EXPECT_EQ(visible, network == TcpNetwork::kIsolated);
  }
}

/// Whether two sides with the same secret connect; their contexts may be of any age.
bool connect(const std::shared_ptr<const TlsContext>& dialing,
             const std::shared_ptr<const TlsContext>& listening) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  TlsSession dialer(dialing, Descriptor(ends[0]), {.role = Role::kDialer, .peer = "listener", .host = {}});
  TlsSession listener(listening, Descriptor(ends[1]),
                      {.role = Role::kListener, .peer = "dialer", .host = {}});
  try {
    for (bool one = false, other = false; !one || !other;) {
      if (!one) one = dialer.shake_hands();
      if (!other) other = listener.shake_hands();
    }
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
    return false;
  }
  return true;
}

TEST(TlsSessionTest, ConnectsAtAnyAgeOfEitherSide) {
  const auto make = [] { return std::make_shared<const TlsContext>(test_secret(), TlsOptions()); };
  const auto old = make();
  EXPECT_TRUE(connect(old, old));
  for (const int hours : {1, 24, 24 * 365 * 10}) {
    clock_ahead = hours * 3600L;
    EXPECT_TRUE(connect(make(), old)) << hours;
    EXPECT_TRUE(connect(old, make())) << hours;
    EXPECT_TRUE(connect(old, old)) << hours;
  }
  const auto of_the_future = make();
  clock_ahead = -3600;  // it was set back
  EXPECT_TRUE(connect(of_the_future, of_the_future));
  clock_ahead = 0;
}

TEST(TlsSessionTest, RenewsItsKeysDuringTraffic) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  const auto context = std::make_shared<const TlsContext>(test_secret(), TlsOptions());
  const auto start = [&](Role role) {
    return TlsSession::Start{.role = role, .peer = "peer", .host = {}, .bytes_per_key = 100'000};
  };
  TlsSession dialer(context, Descriptor(ends[0]), start(Role::kDialer));
  TlsSession listener(context, Descriptor(ends[1]), start(Role::kListener));
  for (bool one = false, other = false; !one || !other;) {
    if (!one) one = dialer.shake_hands();
    if (!other) other = listener.shake_hands();
  }
  dialer.trust();
  listener.trust();
  Bytes sent(2'000'000), got(sent.size());
  std::mt19937 random(1);
  for (std::byte& byte : sent) byte = static_cast<std::byte>(random());
  std::size_t written = 0, read = 0;
  while (read < got.size()) {
    if (written < sent.size()) {
      const iovec place{sent.data() + written, sent.size() - written};
      const ssize_t taken = dialer.write(std::span(&place, 1));
      ASSERT_GE(taken, 0);
      written += static_cast<std::size_t>(taken);
    } else {
      ASSERT_TRUE(dialer.flush());
    }
    const iovec place{got.data() + read, got.size() - read};
    read += listener.read(std::span(&place, 1)).size;
  }
  EXPECT_EQ(got, sent);
  EXPECT_GE(dialer.key_renewals(), 10u);
}

}  // namespace
}  // namespace torchspan::net::tls_transport_test
