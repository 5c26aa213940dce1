#pragma once
#include <memory>
#include <optional>
#include <string>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/mutex.h>

#include "data_parallel/reducer_parts.h"
#include "data_parallel/rounds/round.h"

namespace torchspan::data_parallel {

/// This rank's part in rounds for which it has no gradients: it sends zeros, so that the other ranks' passes
/// end. Thread-safe.
class EmptyRounds {
 public:
  explicit EmptyRounds(ReducerParts& parts) : parts_(parts) {}
  EmptyRounds(const EmptyRounds&) = delete;
  EmptyRounds& operator=(const EmptyRounds&) = delete;

  /// Ends a round that was given up. If this rank cannot stay in step, aborts the group.
  void finish(Round& round);
  /// Takes part in one reduction as a rank that runs no forwards. Returns after it; throws its failure.
  void shadow(RoundOptions options);
  /// Gives up one reduction of a forward that has no backward pass here. Returns at once.
  void refuse(const RoundOptions& options, const std::string& reason);
  /// Waits until the other ranks have finished the reduction that was given up last. Returns an error if they did not take
  /// part in it before the group's timeout.
  std::optional<Error> settle();
  /// As settle(), for at most `limit`. Whether they have finished it.
  bool settle_for(Duration limit);
  /// Why the last reduction was given up.
  std::string reason();

 private:
  std::unique_ptr<Round> begin(const RoundOptions& options);
  Future<void> given_up();

  ReducerParts& parts_;
  Mutex mutex_;
  Future<void> given_up_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string reason_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::data_parallel
