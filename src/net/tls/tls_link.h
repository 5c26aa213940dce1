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

/// The driver's half of a channel: what was received and is not delivered yet. Used by one thread at a time,
/// the one in poll(). Methods that throw Error thereby tell how the channel ends.
class TlsLink {
 public:
  TlsLink(std::shared_ptr<TlsChannel> channel, std::uint64_t token, bool dialed,
          const TransportOptions& options);

  const std::shared_ptr<TlsChannel>& channel() const { return channel_; }
  std::uint64_t token() const { return token_; }
  bool dialed() const { return dialed_; }

  /// Where the first lane's next bytes belong, as FrameParser::targets().
  std::size_t targets(std::span<iovec> places) { return parser_.targets(places); }
  /// Takes `direct` bytes in those places and the `rest`, and delivers what is complete.
  void take(std::size_t direct, BytesView rest, Handler& handler);
  Assembly& assembly() { return assembly_; }
  /// Delivers what pieces have completed.
  void deliver_assembled(Handler& handler);

  /// So much waits behind a striped message that the first lane has to wait as well.
  bool choked() const;
  /// The peer said goodbye, and all it sent before is delivered.
  bool heard_goodbye() const { return parser_.goodbye() && assembly_.empty(); }
  /// The peer said goodbye, perhaps with pieces still under way.
  bool is_leaving() const { return parser_.goodbye(); }
  /// Why a channel ends whose peer's bytes have ended.
  Error end_of_stream() const;

  bool open = false;                 ///< the peer is proven
  ChannelToken shared_token{};       ///< both sides' name for the channel
  std::uint8_t granted = 0;          ///< lanes beside the first
  TimePoint heard{};                 ///< when the last bytes came
  std::vector<std::uint64_t> lanes;  ///< tokens of its connections, the first lane's first
  std::vector<Address> addresses;    ///< to be dialled, in order
  std::size_t address = 0;           ///< which of them is being dialled, or answered
  TlsPlace place;                    ///< that was dialled

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
