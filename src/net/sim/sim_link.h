#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/time.h>

namespace torchspan::net {

class SimChannel;

/// What travels on a simulated link.
struct Packet {
  enum class Kind : std::uint8_t {
    kDial,       ///< a call, with the dialer's greeting
    kHandshake,  ///< bytes of the handshake
    kMessage,
    kGoodbye,  ///< the sender closed its channel
    kEnd,      ///< the sender is gone
    kNobody,   ///< the answer to a call that nobody takes
  };
  Kind kind;
  Bytes header;  ///< of a message, or the bytes of a handshake
  std::vector<Bytes> segments;
  Duration extra{0};    ///< delay beyond the network's latency
  bool held = false;    ///< until unblock()
  bool copied = false;  ///< a duplicate, which weighs nothing
  TimePoint due{};

  std::size_t size() const;
};

/// One direction of a link: packets in order of sending, each due at a time. Not thread-safe.
struct SimLink {
  std::string from;  ///< names of transports
  std::string to;
  std::weak_ptr<SimChannel> source;
  std::weak_ptr<SimChannel> target;  ///< nobody until the call is taken
  std::deque<Packet> packets;
  bool hold_rest = false;  ///< messages sent from now on are held
  bool dead = false;       ///< the sender was killed: takes nothing more

  /// Takes what may arrive at `now`: the packets at the front that are due; with `reorder` also messages
  /// behind others.
  std::vector<Packet> take_due(TimePoint now, bool reorder);
};

}  // namespace torchspan::net
