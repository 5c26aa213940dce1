#pragma once
#include <functional>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <torchspan/collective/c10d.h>
#include <torchspan/collective/group.h>

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
  std::string engine = {};  ///< for messages
  std::function<C10dGroup(const std::vector<int>& members)> split = {};
  /// On any thread: fails blocked calls and all later ones. May be empty.
  std::function<void()> abort = {};
};

/// BlockingCollectives over a LibTorch process group.
class C10dCollectives final : public BlockingCollectives {
 public:
  explicit C10dCollectives(C10dGroup group)
      : group_(std::move(group.group)),
        engine_(std::move(group.engine)),
        split_(std::move(group.split)),
        abort_(std::move(group.abort)) {}

  std::string name() const override { return "c10d:" + engine_; }
  void all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  void broadcast(at::Tensor tensor, int root) override;
  void all_gather(at::Tensor mine, at::Tensor all) override;
  void all_to_all(at::Tensor mine, const std::vector<std::int64_t>& mine_counts, at::Tensor all,
                  const std::vector<std::int64_t>& all_counts) override;
  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members) override;
  void abort(const Error&) override {
    if (abort_) abort_();
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::string engine_;
  const std::function<C10dGroup(const std::vector<int>& members)> split_;
  const std::function<void()> abort_;
};

}  // namespace torchspan::collective
