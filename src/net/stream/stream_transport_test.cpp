#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "net/api/stream.h"
#include "net/framing.h"
#include "net/handshake.h"
#include "net/stream/socket.h"
#include "tests/support/errors.h"

/// What only sockets have: addresses, files, users, ports, descriptors, and raw bytes from a peer that knows
/// the secret. Everything else is in tests/conformance.
namespace torchspan::net::stream_transport_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;

constexpr Duration kPatience = std::chrono::seconds(30);

Secret test_secret() { return Secret::from_bytes(Bytes(32, std::byte{'k'})); }

struct Journal : Handler {
  void on_accepted(const std::shared_ptr<Channel>& channel) override { accepted.push_back(channel); }
  void on_message(const std::shared_ptr<Channel>&, Message message) override {
    received.push_back(std::move(message));
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override { closed.push_back(reason); }
  void on_refused(const std::string& peer, const Error& reason) override {
    refused.emplace_back(peer, reason);
  }

  std::vector<std::shared_ptr<Channel>> accepted;
  std::vector<Message> received;
  std::vector<Error> closed;
  std::vector<std::pair<std::string, Error>> refused;
};

/// A transport that the test drives, and a private directory.
class StreamTransportTest : public ::testing::Test {
 protected:
  StreamTransportTest() {
    std::string name = ::testing::TempDir() + "torchspan-XXXXXX";
    directory_ = mkdtemp(name.data());
    start({});
  }
  ~StreamTransportTest() override {
    transport_.reset();
    std::filesystem::remove_all(directory_);
  }

  void start(TransportOptions options) {
    options.secret = test_secret();
    transport_ = make_stream_transport(*executor_, journal_, std::move(options));
  }
  std::string path(const std::string& name = "socket") const { return directory_ + "/" + name; }
  std::string address(const std::string& name = "socket") const { return "unix:" + path(name); }
  void drive_until(const std::function<bool()>& happened) {
    const Deadline deadline = executor_->deadline_in(kPatience);
    while (!happened()) {
      ASSERT_FALSE(deadline.passed(executor_->now())) << "not reached within the time limit";
      if (!transport_->poll()) transport_->wait(deadline);
    }
  }
  static Descriptor dial_raw(const std::string& text) {
    const Address address = parse_address(text);
    Descriptor socket(::socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket.get(), address.raw(), address.socket_size), 0);
    EXPECT_EQ(::fcntl(socket.get(), F_SETFL, O_NONBLOCK), 0);
    return socket;
  }
  /// A raw connection that has proved the secret.
  Descriptor dial_authenticated(const std::string& text) {
    Descriptor socket = dial_raw(text);
    HandshakeOptions options{.secret = test_secret(), .peer = text};
    draw_nonce(options.nonce);
    Handshake handshake(Role::kDialer, options);
    while (!handshake.done()) {
      const Bytes output = handshake.take_output();
      if (!output.empty()) {
        EXPECT_EQ(::send(socket.get(), output.data(), output.size(), 0), static_cast<ssize_t>(output.size()));
      }
      transport_->poll();
      std::byte bytes[128];
      const ssize_t got = ::recv(socket.get(), bytes, sizeof bytes, 0);
      if (got > 0) handshake.receive(BytesView(bytes, static_cast<std::size_t>(got)));
    }
    drive_until([&] { return !journal_.accepted.empty(); });
    return socket;
  }
  static void say(const Descriptor& socket, BytesView bytes) {
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  std::string directory_;
  Journal journal_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(StreamTransportTest, NeedsASecret) {
  const Error error = error_of([&] { make_stream_transport(*executor_, journal_, {}); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), HasSubstr("TransportOptions::secret"));
}

TEST_F(StreamTransportTest, ListensOnlyInADirectoryClosedToOthers) {
  for (const mode_t mode : {0755, 0710, 0701}) {
    ASSERT_EQ(chmod(directory_.c_str(), mode), 0);
    const Error error = error_of([&] { transport_->listen(address()); });
    EXPECT_EQ(error.kind(), ErrorKind::kDenied);
    EXPECT_THAT(error.message(), HasSubstr("chmod 700 '" + directory_ + "'"));
  }
  ASSERT_EQ(chmod(directory_.c_str(), 0700), 0);
  EXPECT_EQ(transport_->listen(address()), address());
}

TEST_F(StreamTransportTest, AdvisesHowToCreateAMissingDirectory) {
  const Error error = error_of([&] { transport_->listen(address("missing/socket")); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), HasSubstr("mkdir -m 700 '" + path("missing") + "'"));
}

TEST_F(StreamTransportTest, ReportsAPathThatIsTooLong) {
  const std::string longest = path(std::string(107 - directory_.size() - 1, 'x'));
  ASSERT_EQ(longest.size(), 107u);
  EXPECT_NO_THROW(transport_->listen("unix:" + longest));
  const Error error = error_of([&] { transport_->listen("unix:" + longest + "x"); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), HasSubstr("108 bytes"));
  EXPECT_THAT(error.message(), HasSubstr("107"));
  EXPECT_EQ(error_of([&] { transport_->connect("unix:relative", {}); }).kind(), ErrorKind::kInvalid);
}

TEST_F(StreamTransportTest, RemovesItsSocketFileWhenItEnds) {
  transport_->listen(address());
  EXPECT_TRUE(std::filesystem::exists(path()));
  transport_.reset();
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(StreamTransportTest, KeepsASocketFileThatReplacedItsOwn) {
  transport_->listen(address());
  std::filesystem::remove(path());
  Journal other_journal;
  TransportOptions options;
  options.secret = test_secret();
  const auto other = make_stream_transport(*executor_, other_journal, options);
  other->listen(address());
  transport_.reset();
  EXPECT_TRUE(std::filesystem::exists(path()));
}

TEST_F(StreamTransportTest, TakesOverTheSocketFileOfADeadProcess) {
  {
    // Closing a listening socket leaves its file behind, as a killed process does.
    const Address left = parse_address(address());
    const Descriptor dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(dead.get(), left.raw(), left.socket_size), 0);
  }
  ASSERT_TRUE(std::filesystem::exists(path()));
  EXPECT_EQ(transport_->listen(address()), address());
  dial_authenticated(address());
}

TEST_F(StreamTransportTest, DetectsAnAddressInUseWithoutConnectingToTheListener) {
  transport_->listen(address());
  const Error error = error_of([&] { transport_->listen(address()); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), HasSubstr("in use"));
  for (int i = 0; i < 10; ++i) {
    transport_->wait(executor_->deadline_in(std::chrono::milliseconds(5)));
    while (transport_->poll()) {
    }
  }
  EXPECT_TRUE(journal_.refused.empty());
  dial_authenticated(address());
}

TEST_F(StreamTransportTest, NeverRemovesAFileThatIsNotASocket) {
  std::ofstream(path()) << "precious";
  const Error error = error_of([&] { transport_->listen(address()); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_TRUE(std::filesystem::exists(path()));
}

TEST_F(StreamTransportTest, NamesAPortThatIsInUseAndWhatToDo) {
  const std::string bound = transport_->listen("tcp:127.0.0.1:0");
  const std::string port = bound.substr(bound.rfind(':') + 1);
  const Error error = error_of([&] { transport_->listen(bound); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), HasSubstr("port " + port + " is in use"));
  EXPECT_THAT(error.message(), HasSubstr("sport = :" + port));
}

TEST_F(StreamTransportTest, RejectsTcpThatLeavesTheHostAndNamesTheAlternative) {
  for (const char* away :
       {"tcp:10.0.0.1:1234", "tcp:0.0.0.0:1234", "tcp:[::]:1234", "tcp:example.org:1234"}) {
    SCOPED_TRACE(away);
    EXPECT_FALSE(transport_->can_reach(away));
    for (const Error& error :
         {error_of([&] { transport_->listen(away); }), error_of([&] { transport_->connect(away, {}); })}) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      EXPECT_THAT(error.message(), HasSubstr("tls"));
    }
  }
  EXPECT_TRUE(transport_->can_reach("tcp:127.0.0.1:1234"));
  EXPECT_TRUE(transport_->can_reach("tcp:localhost:1234"));
  EXPECT_TRUE(transport_->can_reach("tcp:[::1]:1234"));
  for (const char* wrong :
       {"tcp:127.0.0.1", "tcp:127.0.0.1:", "tcp:127.0.0.1:65536", "tcp:127.0.0.1:12x", "tcp::80"}) {
    EXPECT_EQ(error_of([&] { transport_->connect(wrong, {}); }).kind(), ErrorKind::kInvalid) << wrong;
  }
}

TEST_F(StreamTransportTest, NamesThePeersItAccepts) {
  transport_->listen(address());
  const Descriptor peer = dial_authenticated(address());
  EXPECT_EQ(journal_.accepted.at(0)->peer(), address() + " (process " + std::to_string(getpid()) + ")");
}

TEST_F(StreamTransportTest, DeniesAPeerOfAnotherUser) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Descriptor one(ends[0]), other(ends[1]);
  EXPECT_NO_THROW(check_peer_user(one.get(), "unix:/peer", ::geteuid()));
  const Error error = error_of([&] { check_peer_user(one.get(), "unix:/peer", ::geteuid() + 1); });
  EXPECT_EQ(error.kind(), ErrorKind::kDenied);
  EXPECT_THAT(error.message(), HasSubstr("unix:/peer"));
}

TEST_F(StreamTransportTest, CutsOffAnAuthenticatedPeerThatBreaksTheFraming) {
  transport_->listen(address());
  const Descriptor peer = dial_authenticated(address());
  say(peer, Bytes(kPrefixBytes, std::byte{0x7f}));
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kInvalid);
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("process " + std::to_string(getpid())));
}

TEST_F(StreamTransportTest, AllocatesNothingForLengthsThatAnAuthenticatedPeerClaims) {
  TransportOptions options;
  options.allocator = [](std::size_t size) -> Buffer {
    ADD_FAILURE() << "allocated " << size;
    return {};
  };
  start(options);
  transport_->listen(address());
  const Descriptor peer = dial_authenticated(address());
  const FramePrefix claim({}, std::vector<Segment>{{nullptr, std::size_t{1} << 50, nullptr}});
  say(peer, claim.bytes());
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kInvalid);
}

TEST_F(StreamTransportTest, ReportsWhetherAPeerDiedInsideAMessage) {
  transport_->listen(address());
  {
    const Descriptor peer = dial_authenticated(address());
    const Bytes header(100);
    say(peer, FramePrefix(header, {}).bytes());
  }
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("in the middle of a message"));
}

TEST_F(StreamTransportTest, DistinguishesAGoodbyeFromADeath) {
  transport_->listen(address());
  const Descriptor peer = dial_authenticated(address());
  say(peer, goodbye_frame());
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("closed the channel"));
}

TEST_F(StreamTransportTest, EndsAClosedChannelWhosePeerReadsNoneOfWhatIsQueued) {
  TransportOptions options;
  options.linger = std::chrono::milliseconds(50);
  start(options);
  transport_->listen(address());
  const Descriptor peer = dial_authenticated(address());
  const auto channel = journal_.accepted.at(0);
  channel->send(Bytes(4 << 20), {});
  channel->close();
  EXPECT_GT(channel->unsent_bytes(), 0u);
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_THAT(journal_.closed.at(0).message(), HasSubstr("did not acknowledge it in time"));
  EXPECT_EQ(channel->unsent_bytes(), 0u);
}

TEST_F(StreamTransportTest, DeniesAListenerThatDoesNotKnowTheSecret) {
  const Descriptor impostor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Address place = parse_address(address());
  ASSERT_EQ(::bind(impostor.get(), place.raw(), place.socket_size), 0);
  ASSERT_EQ(::listen(impostor.get(), 1), 0);
  transport_->connect(address(), Deadline::never());
  const Descriptor caller(::accept(impostor.get(), nullptr, nullptr));
  HandshakeOptions options{.secret = Secret::random(), .peer = "caller"};
  draw_nonce(options.nonce);
  Handshake handshake(Role::kListener, options);
  // The listener sends a valid hello, then a wrong proof.
  say(caller, handshake.take_output());
  Bytes proof(33, std::byte{2});
  say(caller, proof);
  drive_until([&] { return !journal_.closed.empty(); });
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kDenied);
}

TEST_F(StreamTransportTest, WaitsWithoutSpinningWhenDescriptorsRunOutAndServesLater) {
  transport_->listen(address());
  transport_->poll();
  const Descriptor caller = dial_raw(address());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_free = ::dup(caller.get());
  ::close(next_free);
  const rlimit tight{static_cast<rlim_t>(next_free), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  int busy_polls = 0;
  for (int i = 0; i < 5; ++i) {
    transport_->wait(executor_->deadline_in(std::chrono::milliseconds(20)));
    if (transport_->poll()) ++busy_polls;
  }
  const Journal during = journal_;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LE(busy_polls, 2);
  ASSERT_FALSE(during.refused.empty());
  EXPECT_EQ(during.refused.at(0).second.kind(), ErrorKind::kOverloaded);
  EXPECT_THAT(during.refused.at(0).second.message(), HasSubstr("ulimit -n"));
  dial_authenticated(address());
}

TEST_F(StreamTransportTest, ReportsThatADialFoundNoDescriptor) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_free = ::dup(0);
  ::close(next_free);
  const rlimit tight{static_cast<rlim_t>(next_free), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  transport_->connect(address(), Deadline::never());
  transport_->poll();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_EQ(journal_.closed.size(), 1u);
  EXPECT_EQ(journal_.closed.at(0).kind(), ErrorKind::kOverloaded);
}

TEST_F(StreamTransportTest, ListensAtSeveralAddresses) {
  transport_->listen(address("one"));
  transport_->listen(address("two"));
  const std::string tcp = transport_->listen("tcp:[::1]:0");
  for (const std::string& place : {address("one"), address("two"), tcp}) {
    const std::size_t before = journal_.accepted.size();
    const Descriptor peer = dial_authenticated(place);
    drive_until([&] { return journal_.accepted.size() == before + 1; });
  }
}

}  // namespace
}  // namespace torchspan::net::stream_transport_test
