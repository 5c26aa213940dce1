#include "engine/operators/operator_recorder.h"

#include <map>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "core/api/operator_spans.h"
#include "engine/operators/operator_inputs.h"

namespace torchspan::engine {
namespace {

/// The name of the module that registers the parameter `path`, such as "layers.0.weight", inside the module `name`.
std::string module_of(const std::string& name, const std::string& path) {
  const std::size_t end = path.rfind('.');
  const std::string inner = end == std::string::npos ? "" : path.substr(0, end);
  if (name.empty()) return inner.empty() ? "model" : inner;
  return inner.empty() ? name : name + "." + inner;
}

}  // namespace

void OperatorRecorder::add(const std::string& name, const torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  std::map<std::string, std::int32_t> counts;
  MutexLock lock(mutex_);
  for (const auto& parameter : parameters) {
    if (!parameter.value().defined()) continue;
    const std::string owner = module_of(name, parameter.key());
    const std::int32_t number = counts[owner]++;
    if (!places_.emplace(parameter.value().unsafeGetTensorImpl(), parameters_.size()).second) continue;
    parameters_.push_back({owner, number});
    kept_.push_back(parameter.value());
  }
}

void OperatorRecorder::stop() {
  MutexLock lock(mutex_);
  spans_ = nullptr;
}

std::optional<OperatorRecorder::Use> OperatorRecorder::find(const at::Tensor& tensor) const {
  if (!tensor.defined()) return std::nullopt;
  const bool view = tensor.is_view();
  const auto place = places_.find((view ? tensor._base() : tensor).unsafeGetTensorImpl());
  if (place == places_.end()) return std::nullopt;
  return Use{place->second, view};
}

std::optional<OperatorRecorder::Use> OperatorRecorder::find(const c10::IValue& input) const {
  if (input.isTensor()) return find(input.toTensor());
  if (!input.isTensorList()) return std::nullopt;
  for (const c10::IValue& element : input.toListRef()) {
    if (const auto use = find(element.toTensor())) return use;
  }
  return std::nullopt;
}

OperatorRecorder::Begun OperatorRecorder::begin(const at::RecordFunction& function) {
  Begun begun;
  MutexLock lock(mutex_);
  if (spans_ == nullptr) return begun;
  if (function.scope() == at::RecordScope::FUNCTION && at::GradMode::is_enabled()) {
    const auto thread = inside_.find(function.threadId());
    if (thread == inside_.end()) {
      for (const c10::IValue& input : inputs_of(function)) {
        if (!begun.use) begun.use = find(input);
      }
    }
    if (begun.use) {
      inside_[function.threadId()] = 1;
      begun.first_node = at::sequence_number::peek();
    }
  }
  begun.at = spans_->executor().now();
  return begun;
}

void OperatorRecorder::end(const at::RecordFunction& function, const Begun& begun) {
  const bool here = !function.isAsync() && function.threadId() == at::RecordFunction::currentThreadId();
  MutexLock lock(mutex_);
  if (begun.use) inside_.erase(function.threadId());
  if (spans_ == nullptr || !here || begun.at == TimePoint()) return;
  const bool backward = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  const bool of_forward = backward && function.seqNr() >= 0 && function.forwardThreadId() != 0;
  if (options_.operators || of_forward) {
    SpanLink link;
    if (function.seqNr() >= 0) link.id = static_cast<std::uint64_t>(function.seqNr());
    if (of_forward) link.part = static_cast<std::int32_t>(function.forwardThreadId());
    spans_->record(kOperatorSpan, function.name(), begun.at, link);
  }
  if (begun.use) {
    const Parameter& parameter = parameters_[begun.use->parameter];
    spans_->record(kModuleSpan, parameter.module, begun.at,
                   {.id = begun.first_node,
                    .peer = begun.use->view ? kFirstView + parameter.number : parameter.number,
                    .part = static_cast<std::int32_t>(function.threadId()),
                    .bytes = at::sequence_number::peek() - begun.first_node});
  }
}

}  // namespace torchspan::engine
