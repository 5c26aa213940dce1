#include "pipeline/runtime/step_input.h"

#include <fmt/format.h>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {

StepInput::StepInput(const LocalPipeline& local, const StepBegin& begin, Batch input)
    : local_(local),
      id_(begin.id),
      has_backwards_(has_backwards(begin.kind)),
      split_(begin.rows),
      input_(std::move(input)) {}

Activation StepInput::micro_batch(int micro_batch) const {
  Activation activation;
  activation.batch = slice(input_, split_.first(micro_batch), split_.rows(micro_batch));
  for (const c10::IValue& member : activation.batch.members) {
    activation.wants_gradient.push_back(
        has_backwards_ && member.isTensor() && member.toTensor().requires_grad() ? 1 : 0);
  }
  return activation;
}

void StepInput::put_gradients(int micro_batch, std::vector<at::Tensor> gradients) {
  gradients_[micro_batch] = std::move(gradients);
}

/// A member without rows went to all micro-batches: its gradient is the sum of theirs.
at::Tensor StepInput::whole_gradient(std::size_t member) const {
  const at::Tensor whole = input_.members[member].toTensor().detach();
  const bool is_split = has_rows(input_, member);
  std::vector<at::Tensor> pieces;
  for (int i = 0; i < split_.micro_batches(); ++i) {
    const auto found = gradients_.find(i);
    const at::Tensor piece = found == gradients_.end() ? at::Tensor() : found->second.at(member);
    const at::Tensor like = is_split ? whole.narrow(0, split_.first(i), split_.rows(i)) : whole;
    pieces.push_back(piece.defined() ? piece : at::zeros_like(like));
  }
  return is_split ? at::cat(pieces) : at::stack(pieces).sum(0);
}

void StepInput::backward() {
  if (gradients_.empty()) return;
  torch::autograd::edge_list roots;
  torch::autograd::variable_list root_gradients;
  for (std::size_t member = 0; member < input_.members.size(); ++member) {
    const c10::IValue& value = input_.members[member];
    if (!value.isTensor() || !value.toTensor().requires_grad()) continue;
    roots.push_back(torch::autograd::impl::gradient_edge(value.toTensor()));
    root_gradients.push_back(whole_gradient(member));
  }
  local_.event_queue->set_state(id_.step, true, true, "the backward of the graph before the input",
                                local_.executor().now());
  try {
    torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, false, false, true);
  } catch (...) {
    const ExceptionDescription description = describe(std::current_exception());
    const std::string where = fmt::format("the graph before the input of pipeline '{}'", local_.options.name);
    throw Error(
        ErrorKind::kRemoteFailure,
        fmt::format("step {} of pipeline '{}' failed in the backward of the graph before its input, on "
                    "worker '{}': {}",
                    id_.step, local_.options.name, local_.worker.name(), description.text))
        .with_worker(local_.worker.name())
        .with_frame({local_.worker.name(), where, description.type, description.text});
  }
}

}  // namespace torchspan::pipeline
