#include "pipeline/runtime/step_batch.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/detail/device/streams.h>

#include "device/api/tensors.h"
#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {

StepInput::StepInput(const StepBegin& begin, Batch input)
    : has_backwards_(has_backwards(begin.kind)), rows_(begin.rows), input_(std::move(input)) {}

Activation StepInput::micro_batch(int micro_batch) const {
  const std::int64_t rows = rows_[static_cast<std::size_t>(micro_batch)];
  Activation activation{slice(input_, rows_before(rows_, micro_batch), rows), {}};
  for (const c10::IValue& member : activation.members) {
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
  std::int64_t first = 0;
  for (std::size_t i = 0; i < rows_.size(); first += rows_[i++]) {
    const auto found = gradients_.find(static_cast<int>(i));
    const at::Tensor piece = found == gradients_.end() ? at::Tensor() : found->second.at(member);
    const at::Tensor like = is_split ? whole.narrow(0, first, rows_[i]) : whole;
    pieces.push_back(piece.defined() ? piece : at::zeros_like(like));
  }
  return is_split ? at::cat(pieces) : at::stack(pieces).sum(0);
}

void StepInput::backward() const {
  torch::autograd::edge_list roots;
  torch::autograd::variable_list root_gradients;
  for (std::size_t member = 0; member < input_.members.size(); ++member) {
    const c10::IValue& value = input_.members[member];
    if (!value.isTensor() || !value.toTensor().requires_grad()) continue;
    roots.push_back(torch::autograd::impl::gradient_edge(value.toTensor()));
    root_gradients.push_back(whole_gradient(member));
  }
  torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, false, false, true);
}

void StepOutput::put(int micro_batch, Activation activation) {
  const auto i = static_cast<std::size_t>(micro_batch);
  for (std::size_t member = 0; member < activation.size(); ++member) {
    rows_[i].push_back(has_rows(activation, member) ? activation.members[member].toTensor().size(0) : -1);
  }
  wants_gradient_[i] = std::move(activation.wants_gradient);
  outputs_[i] = static_cast<Batch&&>(activation);
}

Batch StepOutput::take() {
  Batch whole = join(outputs_);
  outputs_.clear();
  for (const auto& wants : wants_gradient_) {
    for (std::size_t member = 0; member < wants.size(); ++member) {
      if (wants[member] != 0) whole.members[member].toTensor().set_requires_grad(true);
    }
  }
  return whole;
}

bool StepOutput::wants_gradients(int micro_batch) const {
  const auto& wants = wants_gradient_[static_cast<std::size_t>(micro_batch)];
  return std::find(wants.begin(), wants.end(), 1) != wants.end();
}

std::vector<std::vector<at::Tensor>> StepOutput::split(const std::vector<at::Tensor>& gradients) const {
  std::vector<std::vector<at::Tensor>> all(rows_.size());
  std::vector<std::int64_t> first(gradients.size(), 0);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    for (std::size_t member = 0; member < gradients.size(); ++member) {
      const std::int64_t rows = rows_[i].at(member);
      const at::Tensor& whole = gradients[member];
      // Outputs without rows were stacked, unless there was only one.
      const bool stacked = rows < 0 && rows_.size() > 1;
      all[i].push_back(!whole.defined() ? whole
                       : rows >= 0      ? whole.narrow(0, first[member], rows)
                       : stacked        ? whole.select(0, static_cast<std::int64_t>(i))
                                        : whole);
      first[member] += std::max<std::int64_t>(rows, 0);
    }
  }
  return all;
}

void StepOutput::add_loss(double share, at::Tensor loss) {
  if (unread_losses_.empty() && !device::has_streams(loss.device())) {
    loss_ += share * loss.item<double>();
    return;
  }
  unread_shares_.push_back(share);
  unread_losses_.push_back(std::move(loss));
}

double StepOutput::loss() {
  const std::vector<double> values = device::read_numbers(unread_losses_);
  for (std::size_t i = 0; i < values.size(); ++i) loss_ += unread_shares_[i] * values[i];
  unread_shares_.clear();
  unread_losses_.clear();
  return loss_;
}

}  // namespace torchspan::pipeline
