#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <torchspan/collective.h>

#include "device/api/torch_version.h"
#include "python/c10d/work.h"
#include "python/job.h"

namespace torchspan::python {

/// torch.distributed's backend "torchspan": c10d's operations on a Group, which checks their arguments on all ranks.
/// Tensors on CPUs. Thread-safe.
class Backend final : public c10d::Backend {
 public:
  struct Names {
    std::string backend;      ///< what get_backend() returns
    std::string group;        ///< equal on the ranks of the group, and on no other group of the world
    bool ends_world = false;  ///< the default group's end is that of the world
  };

  /// Collective over `ranks` (of the world; empty: all).
  static c10::intrusive_ptr<Backend> make(std::shared_ptr<World> world, std::vector<int> ranks, Names names,
                                          std::chrono::milliseconds timeout);
  Backend(std::shared_ptr<World> world, collective::Group group, Names names,
          std::chrono::milliseconds timeout);
  ~Backend() override;

  const std::shared_ptr<World>& world() const { return world_; }

  const std::string getBackendName() const override { return names_.backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return calls_; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options)
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 14)
      override
#endif
      ;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override;

 private:
  /// DistributedDataParallel's logger takes a backend that is named "gloo" for torch's ProcessGroupGloo without asking, and
  /// reads `threads`. The first members are therefore laid out like those of that class (torch 2.9 to 2.15).
  struct LikeGloo : Options {
    using Options::Options;
    std::vector<std::shared_ptr<void>> devices;
    int threads = 2;  ///< torch's default
  };
  const std::shared_ptr<void> in_place_of_a_store_;
  const c10::intrusive_ptr<LikeGloo> like_gloo_ = c10::make_intrusive<LikeGloo>("gloo");

  /// The group, of which a program may keep a handle after it has destroyed the group.
  class OwnGroup {
   public:
    OwnGroup(collective::Group group, const Names& names) : group_(std::move(group)), names_(names) {}
    collective::Group* operator->() { return &*group_; }
    /// For an operation on `tensors`. Throws kCancelled after destroy(), and kUnsupported for other devices than CPUs.
    collective::Group& usable(at::TensorList tensors);
    void destroy() { destroyed_.store(true); }
    void reset() { group_.reset(); }

   private:
    std::optional<collective::Group> group_;  ///< until the destructor of Backend
    const Names& names_;
    std::atomic<bool> destroyed_{false};
  };

  struct Title {
    c10d::OpType type;
    const char* operation;
  };
  template <class T>
  WorkPtr start(Title title, const Tensors& inputs, Tensors outputs, Future<T> future,
                std::function<void(const T&)> take = {});

  std::shared_ptr<World> world_;
  const Names names_;
  OwnGroup group_;
  const std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> barriers_{0};
  std::atomic<std::uint64_t> splits_{0};
};

}  // namespace torchspan::python
