#pragma once
// All differences between the supported LibTorch versions that concern process groups.
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "device/api/torch_version.h"

namespace torchspan::collective::compat {

inline c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, at::Tensor& mine,
                                                 std::vector<std::int64_t>& mine_counts, at::Tensor& all,
                                                 std::vector<std::int64_t>& all_counts) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
  return group.all_to_all_single(all, mine, all_counts, mine_counts);
#else
  return group.alltoall_base(all, mine, all_counts, mine_counts);
#endif
}

/// Ends the work that a process group has launched. Since LibTorch 2.7 the group does this; before, each work is asked,
/// and its tensors are kept until the next launch after its end. NCCL's work can be aborted in 2.1 and later. Not
/// thread-safe.
class AbortableWork {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 7)
  void add(const WorkPtr&) {}
  /// Throws what the process group throws.
  void abort(c10d::ProcessGroup& group) { group.abort(); }
#else
  void add(WorkPtr work) {
    works_.push_back(std::move(work));
    while (works_.size() > 1 && works_.front()->isCompleted()) works_.pop_front();
  }
  /// Throws what the work throws that cannot be aborted; later work is then left alone.
  void abort(c10d::ProcessGroup&) {
    for (const WorkPtr& work : std::exchange(works_, {})) work->abort();
  }

 private:
  std::deque<WorkPtr> works_;  ///< in the order of their launch
#endif
};

/// The process group of an engine. Since LibTorch 2 it contains engines; before, an engine was one.
template <class Engine>
c10::intrusive_ptr<c10d::ProcessGroup> gloo_group(c10::intrusive_ptr<Engine> gloo) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 0)
  auto group = c10::make_intrusive<c10d::ProcessGroup>(gloo->getRank(), gloo->getSize());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, std::move(gloo));
  return group;
#else
  return gloo;
#endif
}

}  // namespace torchspan::collective::compat
