#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>

#include "data_parallel/buckets/bucket_launcher.h"
#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/hold_count.h"
#include "data_parallel/reducer_parts.h"
#include "data_parallel/rounds/round_timer.h"
#include "data_parallel/rounds/status_exchange.h"

namespace torchspan::data_parallel {

/// What a round brings to its conclusion. Copies, because the round's pass may fail meanwhile.
struct ConclusionTerms {
  std::uint64_t round = 0;
  int leader = 0;  ///< the rank whose order of gradients the buckets follow
  RoundReport report;
  std::string reason;                           ///< why this rank gave up
  std::vector<std::uint32_t> order;             ///< parameters as their gradients arrived
  bool is_whole_order = false;                  ///< `order` is worth reporting
  std::optional<c10::Stream> pass_stream = {};  ///< of the pass; nullopt on the CPU or without a pass
};

/// Ends one round after its last launch: waits for the buckets, exchanges the status, and finishes with the
/// averages in the buckets or with the same failure on all ranks. After a failed round the ranks' counts of
/// forwards agree again. After the first successful round it also rebuilds the buckets. Runs on threads of
/// the group.
class Conclusion final : public std::enable_shared_from_this<Conclusion> {
 public:
  Conclusion(ReducerParts& parts, std::shared_ptr<BucketLauncher> launcher, std::shared_ptr<RoundTimer> timer,
             ConclusionTerms terms);
  Conclusion(const Conclusion&) = delete;
  Conclusion& operator=(const Conclusion&) = delete;

  void start();
  /// Completes when this rank knows the outcome.
  const Future<void>& finished() const { return finished_; }
  /// The buckets to use from the next round on, once; null if they stay.
  std::shared_ptr<Buckets> take_rebuilt() { return std::move(rebuilt_); }

 private:
  std::weak_ptr<FutureHost> send_early();
  void await_hooks(std::size_t bucket);
  void send_status();
  void await_status();
  void finish();
  void fail_together();
  void count_reduction();
  void rebuild();
  void fail(std::exception_ptr error);
  std::exception_ptr placed(std::exception_ptr failure) const;

  ReducerParts& parts_;
  const std::shared_ptr<BucketLauncher> launcher_;
  const std::shared_ptr<RoundTimer> timer_;
  ConclusionTerms terms_;
  Future<at::Tensor> status_;
  std::exception_ptr hook_failure_;
  Promise<void> promise_;
  const Future<void> finished_;
  std::shared_ptr<Buckets> rebuilt_;
};

}  // namespace torchspan::data_parallel
