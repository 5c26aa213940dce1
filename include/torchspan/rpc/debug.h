#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan {

/// One entry of a worker's books on references, in the terms of docs/architecture/rref.md. Values that nobody
/// else refers to are not in them.
struct RRefInfo {
  enum class Role : std::uint8_t {
    kOwner,         ///< a value here that others refer to
    kUser,          ///< a reference here to a value elsewhere
    kPendingFork,   ///< the same, not confirmed by the owner yet
    kPendingChild,  ///< a copy of a reference of ours on its way; ours is kept for it
  };
  Role role = Role::kOwner;
  std::string value;                   ///< id: "0:3", the third value that rank 0 made there
  std::string fork;                    ///< id of the reference; empty for owners
  std::string type;                    ///< C++ type; empty: it was not decoded here yet
  std::optional<std::uint64_t> bytes;  ///< owners: of data, when the value was made, where known
  Duration age{0};                     ///< of the entry
  std::string site;                    ///< "train.cpp:41", where the program made the value, if known here
  std::string creator;                 ///< worker
  std::string owner;                   ///< worker
  std::string from;                    ///< users: the worker that sent it; empty: its creation made it
  std::map<std::string, std::size_t> holders;  ///< owners: references by worker; a child: who gets it
  bool there = true;                           ///< owners: whether the creation came

  /// One line, for a terminal.
  std::string str() const;
};

/// What a worker is doing at this moment, for people who look for what hangs or grows: Worker::debug().
struct DebugInfo {
  /// A call that waits for its reply.
  struct Pending {
    std::string call;
    std::string to;    ///< worker
    std::string site;  ///< "train.cpp:41", empty for the library's own messages
    Duration age{0};
    Duration left{0};  ///< to its deadline; Duration::max(): no limit
  };
  /// A request that came and is not answered.
  struct Serving {
    std::string call;
    std::string from;  ///< worker
    Duration age{0};
    bool begun = false;  ///< false: it waits for a thread or for its references
  };
  /// References, in the terms of docs/architecture/rref.md.
  struct References {
    std::size_t owners = 0;            ///< values here that others refer to
    std::size_t forks = 0;             ///< references of others to them
    std::size_t pending_users = 0;     ///< references here that their owner has not confirmed
    std::size_t pending_children = 0;  ///< references here kept for a copy on its way
  };

  std::string worker;
  std::vector<Pending> pending;
  std::vector<Serving> serving;
  References references;
  std::size_t pool_threads = 0;
  std::size_t pool_queued = 0;
  std::uint64_t calls_sent = 0;     ///< since the start, the library's own messages included
  std::uint64_t calls_handled = 0;  ///< the same
  std::uint64_t late_replies = 0;   ///< replies that came after their call had ended

  /// Every entry of the worker's books on references, oldest first, as they are when this is called; empty
  /// once the worker has ended.
  std::vector<RRefInfo> rrefs() const { return list_rrefs ? list_rrefs() : std::vector<RRefInfo>(); }
  std::function<std::vector<RRefInfo>()> list_rrefs;  ///< set by the worker

  /// One line for each thing, oldest first, for a terminal; of references the oldest 20.
  std::string str() const;
};

}  // namespace torchspan
