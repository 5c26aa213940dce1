#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan {

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

  /// One line for each thing, oldest first, for a terminal.
  std::string str() const;
};

}  // namespace torchspan
