#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::data_parallel {

/// What this rank reports at the end of a round.
struct RoundReport {
  bool gave_up = false;      ///< its backward pass failed, or it has none
  bool hook_failed = false;  ///< its communication hook failed
  bool has_pass = false;     ///< its gradients are part of the average
  bool shadow = false;       ///< it runs no forwards, so their number does not count
};

/// The exchange at the end of every round by which the passes of all ranks succeed or fail together: which
/// ranks gave up, how many reduced forwards each has run, which parameters any rank used. One round at a
/// time; note_used() and the forward count are thread-safe.
class StatusExchange {
 public:
  using Done = std::function<void(std::exception_ptr)>;

  /// `tracked`: the number of parameters whose use is exchanged.
  StatusExchange(const collective::Group& group, std::size_t tracked);

  /// Records that the parameter has got a gradient since the last round.
  void note_used(std::size_t parameter);
  void count_forward();
  void restart_count();

  /// Sends this rank's report. A failure to send is a failed future.
  Future<at::Tensor> send(const RoundReport& report);

  // Results, once the future has succeeded:
  /// The highest rank that gave up; -1 if none did.
  int failed_rank() const;
  /// Whether ranks have run different numbers of forwards.
  bool counts_differ() const;
  /// Whether any rank used the parameter. True if its use is not tracked.
  bool used(std::size_t parameter) const;
  /// Sets this rank's count of forwards to the largest of all ranks, so that counts agree again.
  void adopt_count();

  /// Collective: broadcasts why `rank` gave up. `done` receives the error for the pass.
  void broadcast_reason(int rank, const std::string& reason, Done done) const;
  /// Collective: finds the ranks with the most and the fewest forwards. `done` receives the error for the pass.
  void compare_counts(Done done) const;

 private:
  std::int32_t value(std::size_t index) const { return status_.data_ptr<std::int32_t>()[index]; }

  const collective::Group& group_;
  const std::size_t tracked_;
  // The maximum over ranks of: 1 + the rank that gave up, the number of forwards, its negative, use by
  // parameter. In memory shared by the ranks.
  at::Tensor status_;
  std::int32_t sent_count_ = 0;
  Mutex mutex_;
  std::int32_t forwards_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::vector<std::uint8_t> used_ TORCHSPAN_GUARDED_BY(mutex_);  // by parameter, since the last round
};

}  // namespace torchspan::data_parallel
