#pragma once
// What a worker reports about itself, for diagnosis. Includes no LibTorch.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan {
namespace rpc {
class RpcAgent;
}

/// One entry of a worker's reference table (terms: docs/architecture/rref.md). The table omits values that
/// no other worker references.
struct RRefInfo {
  enum class Role : std::uint8_t {
    kOwner,         ///< a value here that other workers reference
    kUser,          ///< a reference here to a remote value
    kPendingFork,   ///< a kUser that the owner has not confirmed
    kPendingChild,  ///< a copy in transit of a reference held here
  };
  Role role = Role::kOwner;
  std::string value;                           ///< id: "0:3" is the third value made on rank 0
  std::string fork;                            ///< reference id; empty for owners
  std::string type;                            ///< C++ type; empty until decoded here
  std::optional<std::uint64_t> bytes;          ///< owners: data size at creation, if known
  Duration age{0};                             ///< since the entry was made
  std::string site;                            ///< creation site, "train.cpp:41", if known here
  std::string creator;                         ///< worker name
  std::string owner;                           ///< worker name
  std::string from;                            ///< users: the sending worker; empty: created here
  std::map<std::string, std::size_t> holders;  ///< owners: references by worker; child: receiver
  bool there = true;                           ///< owners: the creation request has arrived

  /// Formats the entry as one line for a terminal.
  std::string str() const;
};

/// Snapshot of a worker's activity, for finding hangs and leaks; see Worker::debug().
struct DebugInfo {
  /// An outgoing call that waits for its reply.
  struct Pending {
    std::string call;
    std::string to;    ///< worker name
    std::string site;  ///< "train.cpp:41"; empty for internal messages
    Duration age{0};
    Duration left{0};  ///< to its deadline; Duration::max(): none
  };
  /// A received request that has not been answered.
  struct Serving {
    std::string call;
    std::string from;  ///< worker name
    Duration age{0};
    bool begun = false;  ///< false: waits for a thread or for its references
  };
  /// Reference counts (terms: docs/architecture/rref.md).
  struct References {
    std::size_t owners = 0;            ///< values here that other workers reference
    std::size_t forks = 0;             ///< references to them on other workers
    std::size_t pending_users = 0;     ///< references here not confirmed by their owner
    std::size_t pending_children = 0;  ///< references here kept for a copy in transit
  };

  std::string worker;
  std::vector<Pending> pending;
  std::vector<Serving> serving;
  References references;
  std::size_t pool_threads = 0;
  std::size_t pool_queued = 0;
  std::uint64_t calls_sent = 0;     ///< since the start, including internal messages
  std::uint64_t calls_handled = 0;  ///< since the start, including internal messages
  std::uint64_t late_replies = 0;   ///< replies that arrived after their call ended

  /// Returns every entry of the worker's reference table at the time of this call, oldest first. Empty
  /// after the worker has stopped.
  std::vector<RRefInfo> rrefs() const { return list_rrefs_ ? list_rrefs_() : std::vector<RRefInfo>(); }

  /// Formats one line per entry for a terminal, oldest first; at most the 20 oldest references.
  std::string str() const;

 private:
  friend class rpc::RpcAgent;
  std::function<std::vector<RRefInfo>()> list_rrefs_;
};

}  // namespace torchspan
