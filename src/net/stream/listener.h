#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "core/api/descriptor.h"
#include "net/stream/driver_context.h"
#include "net/stream/socket.h"

namespace torchspan::net {

/// Accepts connections at the listening sockets of one transport. Accepts none while max_unauthenticated of
/// them belong to unauthenticated peers, and pauses when the process has no descriptor left. For the driver.
class Listener {
 public:
  /// Takes over an accepted connection; calls add_unauthenticated() if it keeps the connection.
  using TakeConnection = std::function<void(Descriptor socket, const Address& listener)>;

  Listener(const DriverContext& driver, TakeConnection take);

  void add(std::unique_ptr<ListeningSocket> socket);
  /// Accepts what waits at the listening socket `token`; false if there is no such socket.
  bool serve(std::uint64_t token);
  /// Ends the pause of the listening socket `token`, whose timer fired; false if there is no such socket.
  bool end_pause(std::uint64_t token);

  /// Counts the accepted connection `token` as one of an unauthenticated peer.
  void add_unauthenticated(std::uint64_t token);
  /// The peer proved itself, or the connection ended. Ignores tokens that are not counted.
  void remove_unauthenticated(std::uint64_t token);

 private:
  struct Socket {
    std::unique_ptr<ListeningSocket> socket;
    bool watched = false;
    bool paused = false;
  };

  bool is_full() const { return unauthenticated_.size() >= driver_.options.max_unauthenticated; }
  void accept_at(std::uint64_t token, Socket& listening);
  void watch(std::uint64_t token, Socket& listening, bool on);
  void pause(std::uint64_t token, Socket& listening, int reason);
  /// Others are queued: limits the oldest handshake to kMinHandshakeTimeout.
  void shorten_oldest_handshake();
  void resume();

  const DriverContext driver_;
  const TakeConnection take_;
  std::map<std::uint64_t, Socket> sockets_;
  std::map<std::uint64_t, TimePoint> unauthenticated_;  ///< tokens and times of arrival, the oldest first
};

}  // namespace torchspan::net
