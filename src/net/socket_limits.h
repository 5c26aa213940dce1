#pragma once
#include <cstddef>
#include <cstdint>

#include <torchspan/core/time.h>

/// Limits of all transports over sockets.
namespace torchspan::net {

/// Pieces of memory in one system call: of messages to send, and to receive into.
inline constexpr std::size_t kSendIovecs = 64;
inline constexpr std::size_t kReceiveIovecs = 15;

/// While a channel is corked, messages of up to kSmallMessage bytes are collected, up to kMaxCorked bytes.
inline constexpr std::uint64_t kSmallMessage = 4 << 10;
inline constexpr std::uint64_t kMaxCorked = 64 << 10;

/// Connections accepted in one poll, and the pause after the process ran out of descriptors.
inline constexpr int kMaxAcceptsPerPoll = 64;
inline constexpr Duration kPauseWithoutDescriptors = std::chrono::milliseconds(100);

/// A deadline that has passed: do not wait.
inline constexpr Deadline kNoWait{TimePoint::min()};

}  // namespace torchspan::net
