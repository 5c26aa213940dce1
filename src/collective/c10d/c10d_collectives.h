#pragma once
#include <atomic>
#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <torchspan/collective.h>
#include <torchspan/collective/c10d.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// The operation of a process group. Averages are sums that are divided afterwards: not every process group has them.
inline c10d::ReduceOp c10d_op(ReduceOp reduction) {
  switch (reduction) {
    case kMin:
      return c10d::ReduceOp::MIN;
    case kMax:
      return c10d::ReduceOp::MAX;
    case kProduct:
      return c10d::ReduceOp::PRODUCT;
    case kBitAnd:
      return c10d::ReduceOp::BAND;
    case kBitOr:
      return c10d::ReduceOp::BOR;
    case kBitXor:
      return c10d::ReduceOp::BXOR;
    case kSum:
    case kAvg:
      break;
  }
  return c10d::ReduceOp::SUM;
}

/// A process group, and a function that makes the process group of some of its ranks.
struct C10dGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group = {};
  std::string engine = {};  ///< for "gloo", gathers are sums with zeros
  std::function<C10dGroup(const std::vector<int>& members, std::uint64_t number)> split = {};
  /// On any thread: ends blocked operations, or keeps them from touching their tensors, and fails all later ones. May be empty.
  std::function<void()> abort = {};
  std::shared_ptr<Runtime> runtime = {};  ///< not null if abort is set
};

/// BlockingCollectives over a LibTorch process group. If it can be aborted, its operations work on copies: an operation that does
/// not notice the abort is left behind, and ends at the process group's own time-out.
class C10dCollectives final : public BlockingCollectives {
 public:
  explicit C10dCollectives(C10dGroup group)
      : group_(std::move(group.group)),
        engine_(std::move(group.engine)),
        split_(std::move(group.split)),
        abort_(std::move(group.abort)),
        runtime_(std::move(group.runtime)),
        parker_(runtime_ ? runtime_->executor.make_parker() : nullptr) {}
  ~C10dCollectives() override;

  std::string name() const override { return "c10d:" + engine_; }
  void all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  void broadcast(at::Tensor tensor, int root) override;
  void all_gather(at::Tensor mine, at::Tensor all) override;
  void all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) override;
  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members, std::uint64_t number) override;
  void abort(const Error&) override;

 private:
  /// `tensor`, or a copy if an operation may be left behind.
  at::Tensor own(const at::Tensor& tensor) const { return abort_ ? tensor.clone() : tensor; }
  /// Throws Error{kCancelled} after abort().
  void wait(const c10::intrusive_ptr<c10d::Work>& work);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::string engine_;
  const std::function<C10dGroup(const std::vector<int>& members, std::uint64_t number)> split_;
  const std::function<void()> abort_;
  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Parker> parker_;  ///< wakes wait(); not null if abort_ is set
  std::atomic<bool> aborted_{false};
  c10::intrusive_ptr<c10d::Work> left_behind_;
};

}  // namespace torchspan::collective
