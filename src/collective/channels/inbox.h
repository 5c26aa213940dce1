#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

#include "collective/channels/messages.h"

namespace torchspan::collective::channels {

/// One piece of data that a rank sends: what a receiver waits for.
struct PartKey {
  int rank = 0;
  std::uint64_t operation = 0;
  std::uint32_t part = 0;
  friend auto operator<=>(const PartKey&, const PartKey&) = default;
};

/// The received parts of a group's operations, and why no more will arrive. Lanes fill it on their threads;
/// one thread at a time takes from it.
class Inbox {
 public:
  /// `peers`: names of the ranks, of which `self` is this one.
  Inbox(Executor& executor, std::vector<std::string> peers, int self);

  /// Calls `interrupted` about every 20 ms while take() waits; an error that it returns ends the wait.
  void check_while_waiting(std::function<std::optional<Error>()> interrupted);
  /// Calls `wake` when the group fails, without a lock.
  void on_failure(std::function<void()> wake);

  void put(const PartKey& key, std::uint64_t calls, Buffer data);
  /// The rank sends nothing more over this lane. What it sent before can still be taken.
  void end(int rank, int lane, const std::string& why);
  /// Breaks the group, for this rank's calls from `from_call` on; returns whether that is new, because nothing failed before
  /// or only later calls did. A call whose parts are here can still complete. The group's failure is the first one.
  bool fail(const Error& cause, std::uint64_t from_call);
  std::optional<Error> failure();
  /// The failure as this rank announces it.
  std::optional<Abort> announcement();
  /// The failure, if it concerns the current call.
  std::optional<Error> call_failure();
  /// Throws the failure if it concerns the current call.
  void throw_if_failed();

  /// Waits for a part, which arrives over `lane`. Throws, if it is not here, the group's failure; kDisconnected if the
  /// rank ended the lane before it; kTimedOut.
  Buffer take(const PartKey& key, int lane, Deadline deadline);
  /// Waits for at most `time`, less if the group fails; then throws its failure.
  void pause(Duration time);

  /// This rank has begun so many calls of the group.
  void begin(std::uint64_t calls);
  /// The ranks that take() last waited for: those that have not made this rank's current call, or else the
  /// one whose part is missing; empty if it did not wait.
  std::string awaited();

 private:
  bool has_failed() const TORCHSPAN_REQUIRES(mutex_) { return failure_ && begun_ >= failed_from_; }

  Executor& executor_;
  const std::vector<std::string> peers_;
  const int self_;
  const std::unique_ptr<Parker> parker_;
  std::function<std::optional<Error>()> interrupted_;
  Mutex mutex_;
  std::function<void()> wake_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<PartKey, Buffer> parts_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, std::string> ended_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by rank and lane
  std::vector<std::uint64_t> calls_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by rank, as far as it is known here
  std::uint64_t begun_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::optional<PartKey> awaited_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t failed_from_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::collective::channels
