#pragma once
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <new>
#include <sys/socket.h>
#include <unistd.h>

#include "net/api/local.h"
#include "net/framing.h"
#include "net/handshake.h"
#include "net/local/block_pool.h"
#include "net/local/local_transport.h"
#include "net/local/ring.h"
#include "net/local/shared_lane.h"
#include "net/stream/socket.h"

/// For the tests of the local transport: two sides that the test drives, and peers made of bare parts.
namespace torchspan::net::local_test {

constexpr Duration kPatience = std::chrono::seconds(30);
constexpr std::size_t kRing = std::size_t{64} << 10;

inline Secret test_secret() { return Secret::from_bytes(Bytes(32, std::byte{'k'})); }

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

/// A transport with its events and counters.
struct Side {
  Side(Executor& executor, LocalSetup setup, TransportOptions options) {
    LocalOptions& local = setup.options;
    options.secret = test_secret();
    local.metrics = &metrics;
    if (local.ring_bytes == LocalOptions().ring_bytes) local.ring_bytes = kRing;
    transport = make_local_part(executor, journal, std::move(options), std::move(setup));
  }
  std::uint64_t count(const std::string& name) { return metrics.counter("net.local." + name).value(); }

  Metrics metrics;
  Journal journal;
  std::unique_ptr<Transport> transport;
};

/// A peer without a transport: a socket and two rings, after it proved the secret and negotiated shared
/// memory.
struct RawPeer {
  Descriptor socket;
  std::unique_ptr<RingProducer> out;
  std::unique_ptr<RingConsumer> in;

  void write(BytesView bytes) {
    const iovec place{const_cast<std::byte*>(bytes.data()), bytes.size()};
    ASSERT_EQ(out->write({&place, 1}), bytes.size());
  }
  void say(BytesView bytes, int descriptor = -1) const {
    ASSERT_TRUE(send_note(socket.get(), bytes, descriptor));
  }
  static Bytes note(ControlMessage::Kind kind, std::uint64_t number, std::uint64_t size) {
    ByteWriter writer;
    writer.put(kind);
    writer.put_bytes(Bytes(7));
    writer.put(number);
    writer.put(size);
    return writer.take();
  }
  /// A message of one segment, announced to be in `block`.
  static Bytes lending(std::uint64_t block, std::size_t size) {
    const Segment segment{nullptr, size, nullptr};
    ByteWriter writer;
    writer.put_bytes(FramePrefix({}, {&segment, 1}, {&block, 1}).bytes());
    writer.put(block);
    return writer.take();
  }
};

class LocalTransportTest : public ::testing::Test {
 protected:
  LocalTransportTest() {
    std::string name = ::testing::TempDir() + "torchspan-XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~LocalTransportTest() override {
    dialer_.reset();
    listener_.reset();
    std::filesystem::remove_all(directory_);
  }

  void start(LocalOptions dials = {}, LocalOptions listens = {}, TransportOptions options = {}) {
    listener_ = std::make_unique<Side>(*executor_, LocalSetup{std::move(listens), listener_faults_}, options);
    dialer_ = std::make_unique<Side>(*executor_, LocalSetup{std::move(dials), dialer_faults_}, options);
    address_ = listener_->transport->listen("unix:" + directory_ + "/socket");
  }
  /// Opens a channel that uses shared memory; `back_` is the listener's end.
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
      ASSERT_FALSE(deadline.passed(executor_->now())) << "not reached within the time limit";
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
  /// Sends in both directions and checks the received messages.
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

  /// A peer that has proved the secret and not yet negotiated shared memory.
  RawPeer dial_authenticated();
  enum class Verdict : std::uint8_t { kYes, kNo, kYesWithoutNonce };
  /// A peer that has also negotiated; kYesWithoutNonce accepts without the nonce of the listener's ring.
  RawPeer dial_raw(Verdict verdict = Verdict::kYes);
  Error end_of_raw() {
    drive_until([&] { return !listener_->journal.closed.empty(); });
    return listener_->journal.closed.at(0);
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  std::string directory_;
  std::string address_;
  LocalFaults listener_faults_, dialer_faults_;  ///< for start()
  std::unique_ptr<Side> listener_, dialer_;
  std::shared_ptr<Channel> channel_, back_;
};

inline RawPeer LocalTransportTest::dial_authenticated() {
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

/// A record of the negotiation.
inline Bytes record(bool offers, bool accepts, BytesView nonce) {
  ByteWriter writer;
  writer.put(std::uint32_t{0x4c505354});
  writer.put(offers);
  writer.put(accepts);
  writer.put(std::uint16_t{0});
  writer.put(std::uint64_t{kRing});
  writer.put_bytes(nonce);
  return writer.take();
}

inline RawPeer LocalTransportTest::dial_raw(Verdict verdict) {
  RawPeer peer = dial_authenticated();
  std::array<std::byte, 128> bytes;
  auto made = make_memory({}, kRingHeaderBytes + kRing);
  new (made->memory.data()) RingHeader{};
  peer.out = std::make_unique<RingProducer>(std::move(made->memory));
  peer.say(record(true, false, Bytes(kNonceBytes)), made->descriptor.get());
  std::deque<Descriptor> descriptors;
  drive_until([&] { return receive_notes(peer.socket.get(), bytes, descriptors, {}).size == 48; });
  peer.in = std::make_unique<RingConsumer>(map_memory({}, descriptors.at(0), kRingHeaderBytes + kRing));
  const Bytes nonce(begin(peer.in->header().nonce), end(peer.in->header().nonce));
  peer.say(record(false, verdict != Verdict::kNo,
                  verdict == Verdict::kYesWithoutNonce ? Bytes(kNonceBytes) : nonce));
  drive_until([&] { return !listener_->journal.accepted.empty() || !listener_->journal.refused.empty(); });
  if (!listener_->journal.accepted.empty()) channel_ = listener_->journal.accepted.at(0);
  return peer;
}

}  // namespace torchspan::net::local_test
