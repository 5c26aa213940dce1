#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rpc/message.h>

#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// The first message on every channel: which process dialed.
struct Hello {
  static constexpr wire::MessageType kType{0x0001};
  static constexpr FixedString kWireName = "rpc.Hello";
  std::string name;
  std::uint32_t rank = 0;
  std::uint64_t instance = 0;
};

/// Manages the channels to the other workers: dials on first use, accepts, and redials after a break.
/// Thread-safe; never calls the transport's poll(). Its lock may be held while the table's is taken.
class PeerChannels {
 public:
  PeerChannels(net::Transport& transport, Executor& executor, PeerTable& peers, Peer self);

  /// A channel, and the process at its other end.
  struct Link {
    std::shared_ptr<net::Channel> channel;
    PeerId peer;
  };
  /// Returns the channel for requests to a worker. Throws what PeerTable::present() throws.
  Link to(std::uint32_t rank);
  /// Returns the process at the other end, once it sent its hello or if this worker dialed it.
  std::optional<PeerId> peer_of(const net::Channel* channel) const;
  /// Handles the hello of an accepted channel. Returns false if it names no present process of this world.
  bool greet(const std::shared_ptr<net::Channel>& channel, const Hello& hello);
  /// Whether this side closed the channel: messages that still arrive on it are ignored.
  bool is_shut(const net::Channel* channel) const;
  /// Drops a channel that broke before the transport reported it: the next to() dials again.
  void drop(const net::Channel* channel);
  /// Removes a closed channel. Returns the rank at its other end, if it was known and this side did not close
  /// it.
  std::optional<std::uint32_t> closed(const net::Channel* channel);
  /// Closes the channels of a rank: after its process departed, or before another one takes the rank.
  void close(std::uint32_t rank) { close_channels_of(rank); }
  void close_all() { close_channels_of(std::nullopt); }

 private:
  struct Known {
    PeerId peer;
    std::uint64_t number = 0;
    std::shared_ptr<net::Channel> channel;
  };
  Bytes hello_frame(const Protocol& protocol) const;
  void close_channels_of(std::optional<std::uint32_t> rank);
  void no_longer_current(const net::Channel* channel, std::uint32_t rank) TORCHSPAN_REQUIRES(mutex_);

  net::Transport& transport_;
  Executor& executor_;
  PeerTable& peers_;
  const Peer self_;
  mutable Mutex mutex_;
  std::uint64_t counter_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  /// By rank: what to() returns, if it belongs to the process that has the rank now.
  std::map<std::uint32_t, Link> current_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unordered_map<const net::Channel*, Known> known_ TORCHSPAN_GUARDED_BY(mutex_);
  /// Closed by this side, until the transport reports their end.
  std::unordered_map<const net::Channel*, std::shared_ptr<net::Channel>> shut_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
