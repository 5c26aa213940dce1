#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <torchspan/rpc/worker.h>

#include "quorum/api/generation.h"

namespace torchspan::quorum {

/// A trainer's calls to rank 0.
class GenerationClient {
 public:
  /// Throws Error{kInvalid} if the worker has no QuorumExtension.
  GenerationClient(const Worker& worker, std::string trainer);

  /// Waits for the next generation. Throws kDisconnected if rank 0 dies, what rank 0 refuses with, and kInvalid if another
  /// client of this name did so in this process.
  Generation next(const Report& report);
  /// Waits until all members of a generation wait here. Returns false if the generation has ended before that: rank 0 has
  /// left this rank out, a member left it, perhaps because a third one was replaced, or another rank waits to join.
  /// Throws kDisconnected if a member or rank 0 has ended, and kTimedOut after `limit`, which names the missing members.
  bool await_members(const Generation& generation, Duration limit) const;
  /// Tells rank 0 that this rank takes no part any more; does not wait.
  void withdraw(const std::string& why);
  /// Whether the members should report, since a rank waits to join or one has left, as far as this rank knows: rank 0
  /// does, or the first rank of a generation without rank 0, which asks rank 0 now and then. Never waits.
  bool is_awaited(const Generation& generation);
  /// Whether a member other than this rank has ended, as far as this rank knows.
  bool has_ended(const Generation& generation) const;
  /// How many processes of its ranks have ended since the job began, as far as this rank knows.
  std::uint64_t departures(const Generation& generation) const;

 private:
  void await_withdrawal();
  void gather(const Generation& generation, Deadline until) const;
  bool is_over(Deadline until) const;

  const Worker worker_;
  const std::string trainer_;
  bool claimed_ = false;  ///< the name
  std::optional<Future<bool>> asked_;
  std::optional<Future<Unit>> withdrawal_;  ///< until rank 0 has confirmed it
  std::string withdrawn_for_;
};

}  // namespace torchspan::quorum
