#include "autograd/passes/stray_gradients.h"

#include <string_view>
#include <unordered_set>
#include <utility>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/contexts/current_contexts.h"
#include "autograd/passes/pass_state.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::autograd {
namespace {

/// Called when a node runs, in any engine. GraphPass never runs an AccumulateGrad.
std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& node) {
  const void* engine_pass = StrayGradients::engine_pass();
  if (engine_pass == nullptr || std::string_view(node.name()) != "torch::autograd::AccumulateGrad")
    return nullptr;
  if (PassState* pass = current_pass()) pass->stray_gradients().note(engine_pass);
  return nullptr;
}

}  // namespace

at::ThreadLocalState StrayGradients::watched_state() {
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&observe).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  at::ThreadLocalState state;
  at::removeCallback(handle);
  return state;
}

const void* StrayGradients::engine_pass() { return torch::autograd::get_current_graph_task_exec_info(); }

void StrayGradients::begin_inside(const void* engine_pass) {
  MutexLock lock(mutex_);
  outer_.insert(engine_pass);
}

/// The observer does not know which leaf it is, so the first call notes all leaves of the engine's pass.
void StrayGradients::note(const void* engine_pass) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  MutexLock lock(mutex_);
  if (outer_.contains(engine_pass)) return;
  if (std::exchange(noted_, engine_pass) == engine_pass && left_ > 0) {
    --left_;
    return;
  }
  left_ = 0;
  for (torch::autograd::Node* node : *nodes) {
    auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    if (leaf == nullptr || !engine::pass_accumulates_at(*leaf)) continue;
    leaves_.emplace_back(leaf->variable.getIntrusivePtr());
    ++left_;
  }
  if (left_ > 0) --left_;  // this leaf
}

std::vector<at::Tensor> StrayGradients::parameters() {
  std::vector<WeakTensor> leaves;
  {
    MutexLock lock(mutex_);
    leaves.swap(leaves_);
  }
  std::vector<at::Tensor> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const WeakTensor& leaf : leaves) {
    auto alive = leaf.lock();
    if (!alive) continue;
    at::Tensor tensor(std::move(alive));
    if (tensor.grad().defined() && seen.insert(tensor.unsafeGetTensorImpl()).second)
      parameters.push_back(std::move(tensor));
  }
  return parameters;
}

}  // namespace torchspan::autograd
