#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torchspan/detail/net/transport.h>

#include "net/framing.h"
#include "net/tls/hello.h"
#include "net/tls/pieces.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_channel.h"

namespace torchspan::net {

/// The driver's half of a channel: what was received and is not delivered yet. For the driver. If a method
/// throws Error, the channel ends with it.
class TlsLink {
 public:
  TlsLink(std::shared_ptr<TlsChannel> channel, std::uint64_t token, bool dialed,
          const TransportOptions& options);

  const std::shared_ptr<TlsChannel>& channel() const { return channel_; }
  std::uint64_t token() const { return token_; }
  bool dialed() const { return dialed_; }

  /// The places of the first lane's next bytes, as FrameParser::targets().
  std::size_t targets(std::span<iovec> places) { return parser_.targets(places); }
  /// The caller received `direct` bytes into those places, and `rest` after them; delivers complete messages.
  void take(std::size_t direct, BytesView rest, Handler& handler);
  Assembly& assembly() { return assembly_; }
  /// Delivers messages that pieces have completed.
  void deliver_assembled(Handler& handler);

  /// Whether so many bytes wait behind a striped message that the first lane must wait, too.
  bool is_full() const;
  /// The peer said goodbye, and all messages before it are delivered.
  bool heard_goodbye() const { return parser_.goodbye() && assembly_.empty(); }
  /// The peer said goodbye; pieces may still be missing.
  bool is_leaving() const { return parser_.goodbye(); }
  /// Why the channel ends at the end of the peer's stream.
  Error end_of_stream() const;

  bool open = false;                  ///< the peer proved itself
  ChannelToken shared_token{};        ///< both sides' name for the channel
  std::uint8_t granted = 0;           ///< lanes beside the first
  TimePoint heard{};                  ///< when the last bytes arrived
  std::vector<std::uint64_t> lanes;   ///< tokens of its connections, the first lane's first
  std::vector<Address> addresses;     ///< to dial, in this order
  std::vector<std::string> failures;  ///< why addresses before that one could not be dialed
  std::size_t address = 0;            ///< index of the address that is being dialed, or that answered
  TlsPlace place;                     ///< the place that was dialed

 private:
  void sort();
  void deliver(Handler& handler);

  const std::shared_ptr<TlsChannel> channel_;
  const std::uint64_t token_;
  const bool dialed_;
  FrameParser parser_;
  Assembly assembly_;
  std::vector<Message> messages_;
};

}  // namespace torchspan::net
