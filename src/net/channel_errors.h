#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <torchspan/core/error.h>

namespace torchspan::net {

// The errors of channels, the same over all transports. Each names the peer.

/// The peer's connection ended, or its bytes did not come in time, before it proved itself.
Error handshake_broken(const std::string& peer);
Error handshake_late(const std::string& peer);
/// The channel ended after goodbyes, or this side's goodbye was not acknowledged in time.
Error closed_by_peer(const std::string& peer);
Error closed_here(const std::string& peer);
Error not_acknowledged(const std::string& peer);
/// The connection ended without a goodbye: because of `why`, or the peer's stream has ended.
Error peer_gone(const std::string& peer, const std::string& why);
Error stream_ended(const std::string& peer, bool mid_message);
/// The channel ends because of an error in what the peer sent.
Error cut_off(const std::string& peer, const Error& failure);

/// Nothing can be sent any more: because of `ended`, or this side closed the channel.
Error nothing_can_be_sent(const std::string& peer, const std::optional<std::string>& ended);
/// A message of `size` bytes does not fit beside `queued` ones.
Error peer_overloaded(const std::string& peer, std::uint64_t queued, std::uint64_t size, std::uint64_t most);
Error no_memory_to_queue(const std::string& peer);

}  // namespace torchspan::net
