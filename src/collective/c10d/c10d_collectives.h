#pragma once
#include <functional>

#include <torchspan/collective/c10d.h>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// A process group, and a function that makes the group of some of its ranks.
struct C10dGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group = {};
  std::string engine = {};  ///< for messages
  std::function<C10dGroup(const std::vector<int>& members)> split = {};
  /// Callable from any thread: fails pending calls and all later ones. May be empty.
  std::function<void()> abort = {};
};

/// Adapts one of LibTorch's process groups to BlockingCollectives.
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
