#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/time.h>

namespace torchspan::net {

class SimChannel;

/// A packet on a simulated link.
struct Packet {
  enum class Kind : std::uint8_t {
    kDial,       ///< a connection attempt, with the dialer's greeting
    kHandshake,  ///< bytes of the handshake
    kMessage,
    kGoodbye,     ///< the sender closed its channel
    kEnd,         ///< the sender has ended
    kNoListener,  ///< the answer to a connection attempt where no transport listens
  };
  Kind kind;
  Bytes header;  ///< of a message, or the bytes of a handshake
  std::vector<Bytes> segments;
  std::vector<std::uint32_t> device_targets = {};  ///< of the segments
  Duration extra{0};                               ///< delay beyond the network's latency
  bool held = false;                               ///< until unblock()
  bool copied = false;                             ///< a duplicate, which does not count as unsent
  TimePoint due{};

  std::size_t size() const;
};

/// One direction of a link: packets in order of sending, each due at a time. Not thread-safe.
struct SimLink {
  std::string from;  ///< names of transports
  std::string to;
  std::weak_ptr<SimChannel> source;
  std::weak_ptr<SimChannel> target;  ///< null until the connection is accepted
  std::deque<Packet> packets;
  bool hold_rest = false;  ///< messages sent from now on are held
  bool dead = false;       ///< the sender was killed: carries no more packets

  /// Removes the packets that arrive by `now`: those due at the front; with `reorder` also messages behind
  /// others.
  std::vector<Packet> take_due(TimePoint now, bool reorder);
};

}  // namespace torchspan::net
