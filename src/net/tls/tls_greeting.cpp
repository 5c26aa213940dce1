#include "net/tls/tls_greeting.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::net {

void TlsGreeting::say(TlsSession& session, const LaneHello& hello) const {
  // The hello is sent in a separate packet, which arrives even if the probe does not.
  for (Bytes& bytes : std::array{encode(hello), Bytes(probe_bytes(hello))}) {
    const iovec place{bytes.data(), bytes.size()};
    if (bytes.empty() || session.write(std::span(&place, 1)) == static_cast<ssize_t>(bytes.size())) continue;
    throw Error(ErrorKind::kDisconnected, fmt::format("'{}' disconnected during the handshake", peer_));
  }
}

std::optional<LaneHello> TlsGreeting::hear(TlsSession& session, const LaneHello& mine) {
  if (!hello_) {
    if (!fill(session, bytes_, filled_)) return std::nullopt;
    hello_ = decode_lane_hello(bytes_, peer_);
    if (role_ == Role::kDialer) check_agreement(mine, *hello_, peer_);
  }
  Bytes probe(probe_bytes(*hello_));
  if (!fill(session, probe, probed_)) return std::nullopt;
  return hello_;
}

bool TlsGreeting::fill(TlsSession& session, std::span<std::byte> bytes, std::size_t& filled) {
  while (filled < bytes.size()) {
    const iovec place{bytes.data() + filled, bytes.size() - filled};
    const TlsSession::Got got = session.read(std::span(&place, 1));
    filled += got.size;
    if (got.ended || got.broken != 0) {
      throw Error(ErrorKind::kDisconnected,
                  fmt::format("'{}' disconnected during the handshake: see its log for the reason", peer_));
    }
    if (!got.more) break;
  }
  return filled == bytes.size();
}

}  // namespace torchspan::net
