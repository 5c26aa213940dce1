#include "pipeline/runtime/step_output.h"

#include <algorithm>
#include <utility>

#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {

void StepOutput::put(int micro_batch, Activation activation) {
  const auto i = static_cast<std::size_t>(micro_batch);
  const Batch& batch = activation.batch;
  for (std::size_t member = 0; member < batch.size(); ++member) {
    rows_[i].push_back(has_rows(batch, member) ? batch.members[member].toTensor().size(0) : -1);
  }
  wants_gradient_[i] = std::move(activation.wants_gradient);
  outputs_[i] = std::move(activation.batch);
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

}  // namespace torchspan::pipeline
