#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "core/api/descriptor.h"
#include "net/framing.h"
#include "net/handshake.h"
#include "net/stream/lane.h"
#include "net/stream/socket.h"
#include "net/stream/stream_channel.h"

namespace torchspan::net {

/// How long a closed channel waits for its peer to read what is queued, and to acknowledge the goodbye behind it.
class Linger {
 public:
  explicit Linger(Duration limit) : limit_(limit) {}
  /// Returns when a peer must have read something of `unsent` bytes.
  TimePoint begin(TimePoint now, std::size_t unsent) {
    unsent_ = unsent;
    return now + limit_;
  }
  bool has_moved(std::size_t unsent) const { return unsent < unsent_; }

 private:
  const Duration limit_;
  std::size_t unsent_ = 0;
};

/// The driver's half of a connection: its socket, its stage and what has been received. For the driver. If a
/// method throws Error, the connection ends with it.
class Connection {
 public:
  enum class Stage : std::uint8_t { kConnecting, kHandshake, kSettling, kOpen };

  struct Dial {
    Address address;
    Deadline deadline;
  };
  struct Start {
    Descriptor socket;
    std::shared_ptr<StreamChannel> channel;
    std::uint64_t token;
    std::optional<Dial> dial;         ///< set for the side that dials
    std::optional<Error> dial_error;  ///< dialing failed at once
    bool connected = false;
    std::unique_ptr<Lane> lane = {};  ///< used if the peer supports lanes
  };
  Connection(Start start, const TransportOptions& options);

  const std::shared_ptr<StreamChannel>& channel() const { return channel_; }
  std::uint64_t token() const { return token_; }
  int socket() const { return socket_.get(); }
  Stage stage() const { return stage_; }
  bool dialed() const { return dial_.has_value(); }
  const std::optional<Dial>& dial() const { return dial_; }
  const std::optional<Error>& dial_error() const { return dial_error_; }
  bool heard_goodbye() const { return parser_.goodbye(); }

  /// Sends this side's greeting; only in stage kHandshake.
  void greet();
  /// Handles an event of the socket and calls `handler`. `scratch` is memory to receive into.
  void on_event(const Poller::Event& event, std::span<std::byte> scratch, Handler& handler);

  /// Whether frames use the lane instead of the socket.
  bool shares() const { return stage_ == Stage::kOpen && lane_ != nullptr; }
  /// Valid while shares().
  Lane& lane() const { return *lane_; }
  /// Delivers what arrived through the lane and sends what waits for room; returns whether there was any.
  bool serve_lane(Handler& handler);

  bool handshake_pending = true;  ///< the transport clears it at the end of the handshake
  bool watches_writing = false;   ///< by the poller
  Linger linger;                  ///< after close()
  /// Why the timer that fired ends this connection.
  Error timed_out() const;

 private:
  void receive(bool hung_up, std::span<std::byte> scratch, Handler& handler);
  void take(std::size_t direct, BytesView rest, Handler& handler);
  std::exception_ptr parse(std::size_t direct, BytesView rest);
  /// Adds the peer's name to an error of the lane.
  [[noreturn]] void throw_lane(const std::exception_ptr& failure) const;
  void settle(Handler& handler);
  void open(Handler& handler);
  void receive_notes(bool hung_up, Handler& handler);
  /// Delivers about `most` bytes of the lane at most; returns whether there were any.
  bool drain_lane(std::size_t most, Handler& handler);
  void shake_hands(BytesView& bytes, Handler& handler);
  void send_handshake();
  void deliver(Handler& handler);
  [[noreturn]] void throw_end_of_stream() const;

  Descriptor socket_;
  const std::shared_ptr<StreamChannel> channel_;
  const std::uint64_t token_;
  const std::optional<Dial> dial_;
  const std::optional<Error> dial_error_;
  Stage stage_;
  Handshake handshake_;
  std::unique_ptr<Lane> lane_;
  FrameParser parser_;
  std::vector<Message> messages_;
};

}  // namespace torchspan::net
