#include "collective/c10d/c10d_engine.h"

#include <fmt/format.h>
#include <utility>

#include <ATen/Functions.h>

#include "collective/c10d/c10d_collectives.h"
#include "collective/c10d/compat.h"
#include "collective/tensors.h"
#include "core/api/agreement.h"
#include "core/api/throw_invalid.h"

namespace torchspan::collective {
namespace {

/// This rank's part of a process group. Throws Error if the program's factory does not make it.
c10::intrusive_ptr<c10d::ProcessGroup> make_part(const ProcessGroupFactory& factory, const Backend& control) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = factory(control.ranks(), control.rank());
  } catch (...) {
    const std::string trouble = torchspan::describe(std::current_exception()).text;
    throw_invalid(trouble.empty() ? "it threw an exception without a text" : trouble);
  }
  if (!group) throw_invalid("it returned null");
  if (group->getRank() != control.rank() || group->getSize() != control.size()) {
    throw_invalid("it made rank {} of {}, but is rank {} of {}", group->getRank(), group->getSize(),
                  control.rank(), control.size());
  }
  return group;
}

}  // namespace

C10dEngine::C10dEngine(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), works_(std::make_unique<compat::AbortableWork>()) {}
C10dEngine::~C10dEngine() = default;

std::unique_ptr<C10dEngine> C10dEngine::make(const ProcessGroupFactory& factory, const EngineParts& parts) {
  Backend& control = *parts.control;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  const RankOutcome mine = outcome_of([&] {
    group = make_part(factory, control);
    return Bytes();
  });
  all_or_none([&](BytesView bytes) { return control.all_gather_bytes(bytes, parts.timeout); }, mine,
              [&](std::size_t rank, const Error& failure) {
                return Error(
                    ErrorKind::kUnsupported,
                    fmt::format("GroupOptions::process_group of rank {} failed: {}; it must make this "
                                "rank's part of a process group of the given ranks",
                                control.ranks()[rank], failure.message()));
              });
  return std::unique_ptr<C10dEngine>(new C10dEngine(std::move(group)));
}

bool C10dEngine::reduces(at::ScalarType dtype, ReduceOp reduction) const {
  // Not every process group has these.
  if (reduction == kBitAnd || reduction == kBitOr || reduction == kBitXor) return false;
  if (loses_nan(dtype, reduction)) return false;
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return true;
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return reduction != kAvg;
    default:
      return false;
  }
}

void C10dEngine::all_reduce(const at::Tensor& tensor, ReduceOp reduction) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d_op(reduction);
  wait(running().allreduce(tensors, options));
  if (reduction == kAvg) tensors[0].div_(group_->getSize());
}

void C10dEngine::reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) {
  const at::Tensor rows = tensor.view({group_->getSize(), -1});
  std::vector<at::Tensor> outputs{part.view({-1})};
  std::vector<std::vector<at::Tensor>> inputs(1);
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) inputs[0].push_back(rows[rank]);
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d_op(reduction);
  wait(running().reduce_scatter(outputs, inputs, options));
  if (reduction == kAvg) outputs[0].div_(group_->getSize());
}

void C10dEngine::broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::vector<at::Tensor> one{tensors[i]};
    c10d::BroadcastOptions options;
    options.rootRank = roots[i];
    wait(running().broadcast(one, options));
  }
}

void C10dEngine::all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) {
  std::vector<at::Tensor> outputs = received, inputs = sent;
  wait(running().alltoall(outputs, inputs));
}

c10d::ProcessGroup& C10dEngine::running() const {
  if (aborted_) throw Error(ErrorKind::kCancelled, "the process group of this group was aborted");
  return *group_;
}

void C10dEngine::wait(const c10::intrusive_ptr<c10d::Work>& work) {
  works_->add(work);
  work->wait();
}

void C10dEngine::abort() noexcept {
  if (std::exchange(aborted_, true)) return;
  try {
    works_->abort(*group_);
  } catch (...) {  // not every process group has it; its own timeout then ends the work
  }
}

}  // namespace torchspan::collective
