#include "net/channel_errors.h"

#include <fmt/format.h>

namespace torchspan::net {

Error handshake_broken(const std::string& peer) {
  return {ErrorKind::kDisconnected,
          fmt::format("'{}' disconnected during the handshake: see its log for the reason", peer)};
}

Error handshake_late(const std::string& peer) {
  return {ErrorKind::kTimedOut,
          fmt::format("'{}' did not finish the handshake in time: it is stopped, overloaded, or not a worker",
                      peer)};
}

Error closed_by_peer(const std::string& peer) {
  return {ErrorKind::kDisconnected, fmt::format("'{}' closed the channel", peer)};
}

Error closed_here(const std::string& peer) {
  return {ErrorKind::kDisconnected, fmt::format("this side closed the channel to '{}'", peer)};
}

Error not_acknowledged(const std::string& peer) {
  return {ErrorKind::kDisconnected,
          fmt::format("this side closed the channel to '{}', which did not acknowledge it in time", peer)};
}

Error peer_gone(const std::string& peer, const std::string& why) {
  return {ErrorKind::kDisconnected, fmt::format("'{}' is gone: {}", peer, why)};
}

Error stream_ended(const std::string& peer, bool mid_message) {
  return {
      ErrorKind::kDisconnected,
      fmt::format(
          "'{}' is gone{}: its process died or was killed, or the network ended the connection; see its log",
          peer, mid_message ? " in the middle of a message" : "")};
}

Error cut_off(const std::string& peer, const Error& failure) {
  return {failure.kind(), fmt::format("'{}' is cut off: {}", peer, failure.message())};
}

Error nothing_can_be_sent(const std::string& peer, const std::optional<std::string>& ended) {
  return {ErrorKind::kDisconnected, fmt::format("nothing can be sent to '{}': {}", peer,
                                                ended.value_or("this side closed the channel"))};
}

Error peer_overloaded(const std::string& peer, std::uint64_t queued, std::uint64_t size, std::uint64_t most) {
  return {ErrorKind::kOverloaded,
          fmt::format("'{}' does not keep up: {} bytes are queued for it, {} more would pass "
                      "WorkerOptions::max_unsent_bytes ({}); wait for replies before sending more",
                      peer, queued, size, most)};
}

Error no_memory_to_queue(const std::string& peer) {
  return {ErrorKind::kOverloaded, fmt::format("no memory left to queue a message to '{}'", peer)};
}

}  // namespace torchspan::net
