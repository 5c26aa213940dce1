#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rpc/message.h>

#include "rpc/peers/presence.h"

namespace torchspan::rpc {

/// The first message on every channel: who dialled.
struct Hello {
  static constexpr wire::MessageType kType{0x0001};
  std::string name;
  std::uint32_t rank = 0;
  std::uint64_t instance = 0;
};

/// A member of the world as links see it.
struct LinkMember {
  WorkerInfo info;
  std::string address;
  std::uint64_t instance = 0;
  std::uint32_t incarnation = 0;
  PeerId id() const { return {info.rank, incarnation}; }
};

/// The channels to the other workers: dialled when first needed, accepted when they dial, dialled anew after
/// a break. Thread-safe; never calls the transport's poll().
class Links {
 public:
  Links(net::Transport& transport, Executor& executor, LinkMember self);

  /// A worker joined, or came back as another process: what the one before it had is closed.
  void add(LinkMember member);

  /// Whether this very process is known under its rank already.
  bool knows(const LinkMember& member) const;
  /// A channel, and the process at its other end.
  struct Link {
    std::shared_ptr<net::Channel> channel;
    PeerId peer;
  };
  /// The channel for requests to a worker. Throws Error{kDisconnected} when it died or left.
  Link to(std::uint32_t rank);
  /// Who is on the other side, once it said hello or because we dialled it.
  std::optional<PeerId> peer_of(const net::Channel* channel) const;
  /// An accepted channel's hello. False when it names nobody of this world (yet).
  bool greet(const std::shared_ptr<net::Channel>& channel, const Hello& hello);
  /// Whether we closed it, or its peer's place was lost: what still comes on it is not heard.
  bool is_shut(const net::Channel* channel) const;
  /// The channel turned out broken before the transport said so: the next to() dials anew.
  void drop(const net::Channel* channel);
  /// The peer of a channel that closed, if it was known and not shut.
  std::optional<std::uint32_t> closed(const net::Channel* channel);
  /// From now on to() its rank throws `reason`, and its channels are closed. False when that was known
  /// before, or another process has the rank now.
  bool departed(const LinkMember& member, const Error& reason);
  bool is_present(std::uint32_t rank) const;
  std::vector<LinkMember> present() const;
  void close_all();

 private:
  struct Peer {
    LinkMember member;
    std::shared_ptr<net::Channel> channel;
    std::optional<Error> departed;
  };
  struct Known {
    PeerId peer;
    std::uint64_t number = 0;
    std::shared_ptr<net::Channel> channel;
  };
  Bytes hello_frame() const;
  void close_channels_of(std::optional<std::uint32_t> rank);

  net::Transport& transport_;
  Executor& executor_;
  const LinkMember self_;
  mutable Mutex mutex_;
  std::map<std::uint32_t, Peer> peers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t counter_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::unordered_map<const net::Channel*, Known> known_ TORCHSPAN_GUARDED_BY(mutex_);
  /// Known before, until the transport says that they ended.
  std::unordered_map<const net::Channel*, std::shared_ptr<net::Channel>> shut_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc

namespace torchspan {
template <>
struct Wire<rpc::Hello>
    : WireStruct<rpc::Hello, "rpc.Hello", &rpc::Hello::name, &rpc::Hello::rank, &rpc::Hello::instance> {};
}  // namespace torchspan
