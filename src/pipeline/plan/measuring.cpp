#include "pipeline/plan/measuring.h"

#include <map>
#include <unordered_map>

#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::pipeline {
namespace {

/// The type of the totals that allocators report: signed until LibTorch 2.0, unsigned since.
template <class Report>
struct TotalOf;
template <class Class, class Total>
struct TotalOf<void (Class::*)(void*, std::int64_t, Total, Total, c10::Device)> {
  using type = Total;
};
using ReportedTotal = TotalOf<decltype(&c10::MemoryReportingInfoBase::reportMemoryUsage)>::type;

}  // namespace

/// What is alive, by memory. Threads that run a backward report, too.
class AllocationWatch::Ledger final : public c10::MemoryReportingInfoBase {
 public:
  void begin(int owner) {
    MutexLock lock(mutex_);
    owner_ = owner;
  }
  std::int64_t alive(int owner) const {
    MutexLock lock(mutex_);
    const auto found = alive_.find(owner);
    return found == alive_.end() ? 0 : found->second;
  }

  void reportMemoryUsage(void* memory, std::int64_t bytes, ReportedTotal, ReportedTotal,
                         c10::Device) override {
    MutexLock lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found != blocks_.end()) {
      alive_[found->second.owner] -= found->second.bytes;
      blocks_.erase(found);
    }
    if (bytes <= 0) return;  // freed; also what was allocated before the watch
    blocks_.emplace(memory, Block{bytes, owner_});
    alive_[owner_] += bytes;
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  struct Block {
    std::int64_t bytes = 0;
    int owner = 0;
  };
  mutable Mutex mutex_;
  int owner_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::unordered_map<void*, Block> blocks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<int, std::int64_t> alive_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by owner
};

AllocationWatch::AllocationWatch() : AllocationWatch(std::make_shared<Ledger>()) {}

/// A profiler reads its state through the same slot of the thread.
AllocationWatch::AllocationWatch(std::shared_ptr<Ledger> ledger)
    : ledger_(
          c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr
              ? std::move(ledger)
              : throw Error(ErrorKind::kInvalid,
                            "the memory of layers cannot be measured while a profiler of LibTorch runs on "
                            "this thread: stop the profiler first")),
      guard_(c10::DebugInfoKind::PROFILER_STATE, ledger_) {}

void AllocationWatch::begin(int owner) { ledger_->begin(owner); }

std::int64_t AllocationWatch::alive(int owner) const { return ledger_->alive(owner); }

KeptState::KeptState(const std::vector<BuiltLayer>& layers) {
  for (const BuiltLayer& layer : layers) {
    if (!layer.module) continue;
    for (const at::Tensor& parameter : layer.module->parameters()) {
      gradients_.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
    for (const at::Tensor& buffer : layer.module->buffers())
      buffers_.emplace_back(buffer, buffer.detach().clone());
  }
}

KeptState::~KeptState() {
  const torch::autograd::AutoGradMode mode(false);
  for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
  for (auto& [buffer, value] : buffers_) buffer.copy_(value);
}

}  // namespace torchspan::pipeline
