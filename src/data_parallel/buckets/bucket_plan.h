#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/collective/group.h>
#include <torchspan/core/log.h>
#include <torchspan/data_parallel/options.h>

#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/parameter_slots.h"
#include "data_parallel/streams/reduction_stream.h"

namespace torchspan::data_parallel {

/// Owns a reducer's buckets. The first ones follow the parameters in reverse; after the first round all ranks
/// build new ones in the order in which gradients arrived on one rank. Buckets change between rounds only.
class BucketPlan {
 public:
  /// Called with the new buckets, with null if a rank could not build them, or with an error.
  using Rebuilt = std::function<void(std::exception_ptr error, std::shared_ptr<Buckets> buckets)>;

  BucketPlan(Log& log, const ParameterSlots& slots, const DataParallelOptions& options,
             const collective::Group& group);

  const std::shared_ptr<Buckets>& buckets() const { return buckets_; }
  bool needs_rebuild() const;
  /// needs_rebuild() is false from now on.
  void keep() { rebuilt_ = true; }
  struct Order {
    const std::vector<std::uint32_t>& arrived;  ///< parameters, by the arrival of their gradients
    int leader = 0;                             ///< the rank whose order all ranks take
    std::optional<c10::Stream> pass_stream;     ///< which the new buckets belong to; nullopt: the current one
  };
  /// Collective: builds buckets in another order. All ranks get theirs, or none does. Calls `done` on a thread
  /// of the group; `done` must keep this object alive.
  void rebuild(const Order& order, Rebuilt done);
  /// Makes rebuilt buckets the current ones.
  void replace(std::shared_ptr<Buckets> buckets) { buckets_ = std::move(buckets); }

 private:
  std::shared_ptr<Buckets> build(const std::vector<std::size_t>& order) const;
  void build_together(const std::vector<std::size_t>& order, const std::optional<c10::Stream>& pass_stream,
                      const Rebuilt& done);
  void warn_not_rebuilt(int rank, const std::string& reason) const;

  Log& log_;
  const ParameterSlots& slots_;
  const DataParallelOptions& options_;
  const collective::Group& group_;
  std::shared_ptr<Buckets> buckets_;
  bool rebuilt_ = false;
};

}  // namespace torchspan::data_parallel
