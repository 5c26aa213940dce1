#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <new>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torchspan/net/local.h>

#include "net/framing.h"
#include "net/handshake.h"
#include "net/local/blocks.h"
#include "net/local/notes.h"
#include "net/local/ring.h"
#include "net/stream/address.h"

/// What only shared memory has: refusals of the system, lent blocks, sleep, and a peer that knows the secret
/// and lies in every place where it can. Everything else is in tests/conformance.
namespace torchspan::net {
namespace {

using testing::HasSubstr;

constexpr Duration kPatience = std::chrono::seconds(30);
constexpr std::size_t kRing = std::size_t{64} << 10;

Secret test_secret() { return Secret::from_bytes(Bytes(32, std::byte{'k'})); }

struct Journal : Handler {
  void on_accepted(const std::shared_ptr<Channel>& channel) override { accepted.push_back(channel); }
  void on_message(const std::shared_ptr<Channel>&, Message message) override {
    received.push_back(std::move(message));
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override { closed.push_back(reason); }
  void on_refused(const std::string&, const Error& reason) override { refused.push_back(reason); }

  std::vector<std::shared_ptr<Channel>> accepted;
  std::vector<Message> received;
  std::vector<Error> closed;
  std::vector<Error> refused;
};

/// A transport with what it heard and counted.
struct Side {
  Side(Executor& executor, LocalOptions local, TransportOptions options) {
    options.secret = test_secret();
    local.metrics = &metrics;
    if (local.ring_bytes == LocalOptions().ring_bytes) local.ring_bytes = kRing;
    transport = make_local_transport(executor, journal, std::move(options), std::move(local));
  }
  std::uint64_t count(const std::string& name) { return metrics.counter("net.local." + name).value(); }

  Metrics metrics;
  Journal journal;
  std::unique_ptr<Transport> transport;
};

/// A peer by hand, which has dialled, proved the secret and settled to share.
struct RawPeer {
  Descriptor socket;
  std::unique_ptr<RingProducer> out;
  std::unique_ptr<RingConsumer> in;

  void write(BytesView bytes) {
    const iovec place{const_cast<std::byte*>(bytes.data()), bytes.size()};
    ASSERT_EQ(out->write({&place, 1}), bytes.size());
  }
  void say(BytesView bytes, int descriptor = -1) const {
    ASSERT_TRUE(send_with_descriptor(socket.get(), bytes, descriptor));
  }
  static Bytes note(Note::Kind kind, std::uint64_t number, std::uint64_t size) {
    ByteWriter writer;
    writer.put(kind);
    writer.put_bytes(Bytes(7));
    writer.put(number);
    writer.put(size);
    return writer.take();
  }
  /// A message of one segment that is said to lie in `block`.
  static Bytes lending(std::uint64_t block, std::size_t size) {
    const Segment segment{nullptr, size, nullptr};
    ByteWriter writer;
    writer.put_bytes(FramePrefix({}, {&segment, 1}, {&block, 1}).bytes());
    writer.put(block);
    return writer.take();
  }
};

class LocalTransportTest : public testing::Test {
 protected:
  LocalTransportTest() {
    std::string name = testing::TempDir() + "torchspan-XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~LocalTransportTest() override {
    dialer_.reset();
    listener_.reset();
    std::filesystem::remove_all(directory_);
  }

  void start(LocalOptions dials = {}, LocalOptions listens = {}, TransportOptions options = {}) {
    listener_ = std::make_unique<Side>(*executor_, std::move(listens), options);
    dialer_ = std::make_unique<Side>(*executor_, std::move(dials), options);
    address_ = listener_->transport->listen("unix:" + directory_ + "/socket");
  }
  /// A channel that has settled; `back` is the listener's end of it.
  void join() {
    channel_ = dialer_->transport->connect(address_, Deadline::never());
    channel_->send(Bytes(1), {});
    drive_until([&] { return listener_->journal.received.size() == 1; });
    back_ = listener_->journal.accepted.at(0);
    listener_->journal.received.clear();
  }
  void drive_until(const std::function<bool()>& happened) {
    const Deadline deadline = executor_->deadline_in(kPatience);
    while (!happened()) {
      ASSERT_FALSE(deadline.passed(executor_->now())) << "waited in vain";
      bool any = listener_->transport->poll();
      if (dialer_) any |= dialer_->transport->poll();
      if (!any) executor_->yield();
    }
  }
  void send(Channel& channel, std::size_t size, std::uint8_t fill) {
    const Bytes bytes(size, std::byte{fill});
    const Segment segment{bytes.data(), bytes.size(), nullptr};
    channel.send({}, {&segment, 1});
  }
  static bool is_filled(const Buffer& buffer, std::size_t size, std::uint8_t fill) {
    return buffer.size == size && std::all_of(buffer.data, buffer.data + size,
                                              [&](std::byte byte) { return byte == std::byte{fill}; });
  }
  /// Sends both ways and checks what comes.
  void expect_traffic() {
    for (std::uint8_t i = 0; i < 5; ++i) {
      const std::size_t there = listener_->journal.received.size(), home = dialer_->journal.received.size();
      send(*channel_, 300'000, i);
      send(*back_, 300'001, i);
      drive_until([&] {
        return listener_->journal.received.size() > there && dialer_->journal.received.size() > home;
      });
      EXPECT_TRUE(is_filled(listener_->journal.received.back().segments.at(0), 300'000, i));
      EXPECT_TRUE(is_filled(dialer_->journal.received.back().segments.at(0), 300'001, i));
    }
  }

  /// A peer that has proved the secret and not settled yet.
  RawPeer dial_proven();
  enum class Verdict : std::uint8_t { kYes, kNo, kLie };
  /// One that has settled to share, or not to; a lie is a yes without the nonce in the ring.
  RawPeer dial_raw(Verdict verdict = Verdict::kYes);
  Error end_of_raw() {
    drive_until([&] { return !listener_->journal.closed.empty(); });
    return listener_->journal.closed.at(0);
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  std::string directory_;
  std::string address_;
  std::unique_ptr<Side> listener_, dialer_;
  std::shared_ptr<Channel> channel_, back_;
};

RawPeer LocalTransportTest::dial_proven() {
  start();
  dialer_.reset();
  const Address address = parse_address(address_);
  RawPeer peer{Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), {}, {}};
  EXPECT_EQ(::connect(peer.socket.get(), address.raw(), address.socket_size), 0);
  HandshakeOptions options{.secret = test_secret(), .peer = address_, .features = kSharesMemory};
  draw_nonce(options.nonce);
  Handshake handshake(Role::kDialer, options);
  std::array<std::byte, 128> bytes;
  drive_until([&] {
    const Bytes output = handshake.take_output();
    if (!output.empty()) peer.say(output);
    const ssize_t got = ::recv(peer.socket.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) handshake.receive(std::span(bytes).first(static_cast<std::size_t>(got)));
    return handshake.done();
  });
  return peer;
}

/// What two sides say to settle.
Bytes record(bool offers, bool accepts, BytesView nonce) {
  ByteWriter writer;
  writer.put(std::uint32_t{0x4c505354});
  writer.put(offers);
  writer.put(accepts);
  writer.put(std::uint16_t{0});
  writer.put(std::uint64_t{kRing});
  writer.put_bytes(nonce);
  return writer.take();
}

RawPeer LocalTransportTest::dial_raw(Verdict verdict) {
  RawPeer peer = dial_proven();
  std::array<std::byte, 128> bytes;
  auto made = make_memory({}, kRingHeaderBytes + kRing);
  new (made->memory.data()) RingHeader{};
  peer.out = std::make_unique<RingProducer>(std::move(made->memory));
  peer.say(record(true, false, Bytes(kNonceBytes)), made->descriptor.get());
  std::deque<Descriptor> descriptors;
  drive_until([&] { return receive_with_descriptors(peer.socket.get(), bytes, descriptors, {}).size == 48; });
  peer.in = std::make_unique<RingConsumer>(map_memory({}, descriptors.at(0), kRingHeaderBytes + kRing));
  const Bytes nonce(begin(peer.in->header().nonce), end(peer.in->header().nonce));
  peer.say(record(false, verdict != Verdict::kNo, verdict == Verdict::kLie ? Bytes(kNonceBytes) : nonce));
  drive_until([&] { return !listener_->journal.accepted.empty() || !listener_->journal.refused.empty(); });
  if (!listener_->journal.accepted.empty()) channel_ = listener_->journal.accepted.at(0);
  return peer;
}

TEST_F(LocalTransportTest, NeedsARingOfAPossibleSize) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{100'000}, std::size_t{1} << 40}) {
    try {
      start({.ring_bytes = size});
      ADD_FAILURE() << size;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.message(), HasSubstr("LocalOptions::ring_bytes"));
    }
  }
}

TEST_F(LocalTransportTest, LendsLargeSegmentsAndCarriesSmallOnesInTheRing) {
  start();
  join();
  expect_traffic();
  send(*channel_, 1000, 1);
  drive_until([&] { return listener_->journal.received.size() == 6; });
  EXPECT_EQ(dialer_->count("lent"), 5u);
  EXPECT_EQ(dialer_->count("adopted"), 5u);
  EXPECT_EQ(listener_->count("adopted"), 5u);
  EXPECT_EQ(listener_->count("copied") + listener_->count("inlined"), 0u);
  EXPECT_EQ(dialer_->count("inlined"), 0u);
}

TEST_F(LocalTransportTest, RecyclesBlocksThatTheReceiverIsDoneWith) {
  start();
  join();
  for (int i = 0; i < 50; ++i) {
    send(*channel_, 1 << 20, static_cast<std::uint8_t>(i));
    drive_until([&] { return !listener_->journal.received.empty(); });
    EXPECT_TRUE(
        is_filled(listener_->journal.received.at(0).segments.at(0), 1 << 20, static_cast<std::uint8_t>(i)));
    listener_->journal.received.clear();
  }
  EXPECT_LE(dialer_->count("pool_bytes"), 3u << 20);
}

TEST_F(LocalTransportTest, GivesIdleBlocksBackButNoneThatIsInUse) {
  start({.idle_after = std::chrono::milliseconds(20)});
  join();
  for (std::uint8_t i = 0; i < 3; ++i) send(*channel_, 1 << 20, i);
  drive_until([&] { return listener_->journal.received.size() == 3; });
  const std::uint64_t all = dialer_->count("pool_bytes");
  EXPECT_GE(all, 3u << 20);
  const Message kept = std::move(listener_->journal.received.at(1));
  listener_->journal.received.clear();
  const auto rest = [&] { dialer_->transport->wait(executor_->deadline_in(std::chrono::milliseconds(25))); };
  drive_until([&] {
    rest();
    return dialer_->count("pool_bytes") <= all / 3;
  });
  for (int rounds = 0; rounds < 5; ++rounds) rest();
  EXPECT_EQ(dialer_->count("pool_bytes"), all / 3);
  EXPECT_TRUE(is_filled(kept.segments.at(0), 1 << 20, 1));
  send(*channel_, 1 << 20, 4);
  drive_until([&] { return listener_->journal.received.size() == 1; });
  EXPECT_TRUE(is_filled(listener_->journal.received.at(0).segments.at(0), 1 << 20, 4));
}

TEST_F(LocalTransportTest, KeepsAdoptedMemoryWhenBothSidesAreGone) {
  start();
  join();
  send(*channel_, 300'000, 7);
  drive_until([&] { return !listener_->journal.received.empty(); });
  const Buffer buffer = listener_->journal.received.at(0).segments.at(0);
  channel_.reset();
  back_.reset();
  dialer_.reset();
  listener_.reset();
  EXPECT_TRUE(is_filled(buffer, 300'000, 7));
  std::memset(buffer.data, 1, buffer.size);
}

TEST_F(LocalTransportTest, SendsBytesWhenThePoolIsFullAndLendsAgainLater) {
  start({.pool_bytes = 1 << 20});
  join();
  for (std::uint8_t i = 0; i < 8; ++i) {
    send(*channel_, 300'000, i);
    drive_until([&] { return listener_->journal.received.size() == i + 1u; });
  }
  for (std::uint8_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(is_filled(listener_->journal.received.at(i).segments.at(0), 300'000, i));
  }
  EXPECT_EQ(dialer_->count("lent"), 3u);
  EXPECT_EQ(dialer_->count("inlined"), 5u);
  listener_->journal.received.clear();
  send(*channel_, 300'000, 9);
  EXPECT_EQ(dialer_->count("lent"), 4u);
}

TEST_F(LocalTransportTest, TalksThroughTheSocketWhenEitherSideCannotShare) {
  for (const LocalStep step : {LocalStep::kMakeMemory, LocalStep::kReserveMemory, LocalStep::kMapMemory,
                               LocalStep::kPassDescriptor, LocalStep::kTakeDescriptor}) {
    for (const bool dials : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "step " << static_cast<int>(step) << (dials ? ", dialer" : ", listener"));
      const LocalOptions lame{.refuse = [step](LocalStep now) { return now == step; }};
      dialer_.reset();
      listener_.reset();
      dials ? start(lame, {}) : start({}, lame);
      join();
      expect_traffic();
      EXPECT_EQ(dialer_->count("lent") + listener_->count("lent"), 0u);
      channel_->close();
      drive_until([&] { return !listener_->journal.closed.empty() && !dialer_->journal.closed.empty(); });
      EXPECT_THAT(listener_->journal.closed.at(0).message(), HasSubstr("closed the channel"));
    }
  }
}

TEST_F(LocalTransportTest, SendsBytesWhenTheSystemStopsGivingMemory) {
  for (const LocalStep step : {LocalStep::kMakeMemory, LocalStep::kReserveMemory, LocalStep::kMapMemory,
                               LocalStep::kPassDescriptor}) {
    SCOPED_TRACE(testing::Message() << "step " << static_cast<int>(step));
    bool refuses = false;
    dialer_.reset();
    listener_.reset();
    start({.refuse = [&](LocalStep now) { return refuses && now == step; }});
    join();
    refuses = true;
    for (std::uint8_t i = 0; i < 5; ++i) {
      send(*channel_, 300'000, i);
      drive_until([&] { return listener_->journal.received.size() == i + 1u; });
      EXPECT_TRUE(is_filled(listener_->journal.received.back().segments.at(0), 300'000, i));
    }
    EXPECT_EQ(dialer_->count("inlined"), 5u);
    EXPECT_EQ(dialer_->count("pool_bytes"), 0u);
  }
}

TEST_F(LocalTransportTest, SaysWhatToDoWhenItHasNoDescriptorForABlock) {
  bool refuses = false;
  start({}, {.refuse = [&](LocalStep now) { return refuses && now == LocalStep::kTakeDescriptor; }});
  join();
  refuses = true;
  send(*channel_, 300'000, 1);
  drive_until([&] { return !listener_->journal.closed.empty() && !dialer_->journal.closed.empty(); });
  EXPECT_EQ(listener_->journal.closed.at(0).kind(), ErrorKind::kOverloaded);
  EXPECT_THAT(listener_->journal.closed.at(0).message(), HasSubstr("ulimit -n"));
  EXPECT_EQ(dialer_->journal.closed.at(0).kind(), ErrorKind::kDisconnected);
}

TEST_F(LocalTransportTest, LivesOnWhenThisProcessRunsOutOfDescriptors) {
  start();
  join();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_free = ::dup(0);
  ::close(next_free);
  const rlimit tight{static_cast<rlim_t>(next_free), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  send(*channel_, 300'000, 1);
  drive_until([&] { return listener_->journal.received.size() == 1; });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(dialer_->count("inlined"), 1u);
  expect_traffic();
  EXPECT_EQ(dialer_->count("lent"), 5u);
}

TEST_F(LocalTransportTest, KeepsNoDescriptorOfABlock) {
  start();
  join();
  const auto open_files = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open_files();
  expect_traffic();
  EXPECT_GE(dialer_->count("lent"), 5u);
  EXPECT_EQ(open_files(), before);
}

TEST_F(LocalTransportTest, SleepsWhenNothingHappensAndWakesWhenSomethingDoes) {
  start();
  join();
  expect_traffic();
  const auto idle_waits = [&] {
    int waits = 0;
    const Deadline deadline = executor_->deadline_in(std::chrono::milliseconds(50));
    for (; !deadline.passed(executor_->now()); ++waits) {
      EXPECT_LT(waits, 10) << "it spins";
      listener_->transport->wait(deadline);
      listener_->transport->poll();
      if (waits >= 10) break;
    }
    return waits;
  };
  EXPECT_LT(idle_waits(), 10);
  const std::size_t known = listener_->journal.received.size();
  for (int round = 0; round < 200; ++round) {
    Thread sender = executor_->spawn("sender", [&] { send(*channel_, 10, 1); });
    const Deadline deadline = executor_->deadline_in(kPatience);
    while (listener_->journal.received.size() == known + static_cast<std::size_t>(round)) {
      ASSERT_FALSE(deadline.passed(executor_->now())) << "slept through a message";
      if (!listener_->transport->poll()) listener_->transport->wait(deadline);
    }
  }
}

TEST_F(LocalTransportTest, TalksThroughTheSocketToAPeerThatDeclinesAtLast) {
  const RawPeer peer = dial_raw(Verdict::kNo);
  const Bytes header(10, std::byte{3});
  peer.say(FramePrefix(header, {}).bytes());
  peer.say(header);
  drive_until([&] { return !listener_->journal.received.empty(); });
  EXPECT_EQ(listener_->journal.received.at(0).header, header);
}

TEST_F(LocalTransportTest, RefusesAPeerThatCannotReadWhatStandsInTheRing) {
  const RawPeer peer = dial_raw(Verdict::kLie);
  ASSERT_FALSE(listener_->journal.refused.empty());
  EXPECT_EQ(listener_->journal.refused.at(0).kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, RefusesAPeerThatSettlesInAnotherTongue) {
  const RawPeer peer = dial_proven();
  peer.say(Bytes(48, std::byte{0x7f}));
  drive_until([&] { return !listener_->journal.refused.empty(); });
  EXPECT_EQ(listener_->journal.refused.at(0).kind(), ErrorKind::kInvalid);
  EXPECT_TRUE(listener_->journal.accepted.empty());
}

TEST_F(LocalTransportTest, CutsOffAPeerWhoseCountersAreImpossible) {
  {
    RawPeer peer = dial_raw();
    peer.out->header().tail = kRing + 1;
    const Error error = end_of_raw();
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("process " + std::to_string(getpid())));
  }
  RawPeer peer = dial_raw();
  peer.in->header().head = 1;
  EXPECT_THROW(send(*channel_, kRing, 1), Error);
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatBreaksTheFramingInTheRing) {
  RawPeer peer = dial_raw();
  peer.write(Bytes(kPrefixBytes, std::byte{0x7f}));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatTalksNonsenseOnTheSocket) {
  const RawPeer peer = dial_raw();
  peer.say(Bytes(10, std::byte{0x7f}));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatLendsWhatItNeverPassed) {
  RawPeer peer = dial_raw();
  peer.write(RawPeer::lending(5, 100'000));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatLendsABlockTwice) {
  RawPeer peer = dial_raw();
  const std::size_t size = kBlockHeaderBytes + 100'000;
  const auto made = make_memory({}, size);
  peer.say(RawPeer::note(Note::Kind::kBlock, 5, size), made->descriptor.get());
  peer.write(RawPeer::lending(5, 100'000));
  drive_until([&] { return listener_->journal.received.size() == 1; });
  peer.write(RawPeer::lending(5, 100'000));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatAnnouncesMemoryWithoutPassingIt) {
  const RawPeer peer = dial_raw();
  peer.say(RawPeer::note(Note::Kind::kBlock, 5, 100'000));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatRetiresWhatIsNotThere) {
  const RawPeer peer = dial_raw();
  peer.say(RawPeer::note(Note::Kind::kRetired, 5, 0));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatFloodsItWithDescriptors) {
  const RawPeer peer = dial_raw();
  const std::byte wake{1};
  for (int i = 0; i < 70; ++i) peer.say({&wake, 1}, peer.socket.get());
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, DeliversWhatADeadPeerHadFinishedAndSaysWhatItHadNot) {
  {
    RawPeer peer = dial_raw();
    const Bytes header(100);
    peer.write(FramePrefix(header, {}).bytes());
    peer.write(header);
    peer.write(FramePrefix(header, {}).bytes());
  }
  const Error error = end_of_raw();
  EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(error.message(), HasSubstr("in the middle of a message"));
  EXPECT_EQ(listener_->journal.received.size(), 1u);
}

TEST_F(LocalTransportTest, TakesAGoodbyeThroughTheRing) {
  RawPeer peer = dial_raw();
  peer.write(goodbye_frame());
  EXPECT_THAT(end_of_raw().message(), HasSubstr("closed the channel"));
}

}  // namespace
}  // namespace torchspan::net
