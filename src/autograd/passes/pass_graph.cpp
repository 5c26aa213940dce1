#include "autograd/passes/pass_graph.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <torchspan/core/future.h>

#include "autograd/contexts/current_contexts.h"
#include "autograd/passes/pass_errors.h"
#include "autograd/passes/pass_state.h"
#include "core/api/throw_invalid.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::autograd {

void ContextSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (auto taken = context_.offer(pass(), parameter, gradient)) {
    {
      MutexLock lock(mutex_);
      std::erase_if(taken_, [](const Future<void>& done) { return done.done(); });
      taken_.push_back(*taken);
    }
    hold(std::move(*taken));
  } else {
    context_.change_gradients(pass(), [&](engine::GradientMap& gradients) {
      gradients.accumulate(parameter, std::move(gradient));
    });
  }
}

void ContextSink::replace(const at::Tensor& parameter, at::Tensor gradient) {
  context_.change_gradients(
      pass(), [&](engine::GradientMap& gradients) { gradients.replace(parameter, std::move(gradient)); });
}

Future<void> ContextSink::takers_done() const {
  std::vector<Future<void>> taken;
  {
    MutexLock lock(mutex_);
    taken = taken_;
  }
  for (Future<void>& one : taken) one = one.then([](const Future<void>&) {});
  return when_all(std::move(taken));
}

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

void StrayGradientWarning::write(const std::vector<at::Tensor>& parameters) {
  metrics_.counter("autograd.stray_gradients").add(parameters.size());
  std::string shapes;
  for (const at::Tensor& parameter : parameters)
    shapes += fmt::format("{}[{}]", shapes.empty() ? "" : ", ", fmt::join(parameter.sizes(), ", "));
  warning_.write(fmt::format(
      "in a distributed backward pass, a backward function or a hook ran LibTorch's engine, which "
      "put the gradients of {} parameters into .grad; the context does not have them, so its "
      "optimizers do not use them. Pass the parameters of a checkpointed function as detached inputs and "
      "return their gradients (shapes: {})",
      parameters.size(), shapes));
}

namespace {

engine::PassOptions engine_options(const ContextState& context, const PassKey& key, PassGraph::Hooks hooks) {
  engine::PassOptions options;
  options.thread_state = StrayGradients::watched_state();
  options.retain_graph = key.retain_graph;
  options.threads = std::clamp<std::uint32_t>(key.threads, 1, PassKey::kMostThreads);
  options.enlist = std::move(hooks.enlist);
  options.failed = std::move(hooks.failed);
  if (key.mode == PassMode::kSmart) options.counts = context.sends().edges();
  options.events = context.copies().events();
  return options;
}

}  // namespace

PassGraph::PassGraph(std::shared_ptr<ContextState> context, const PassKey& key, Hooks hooks)
    : context_(std::move(context)),
      mode_(key.mode),
      sink_(*context_, key),
      graph_(sink_, engine_options(*context_, key, std::move(hooks))),
      fast_sends_(mode_ == PassMode::kFast ? context_->sends().unused() : std::vector<SendNodePtr>()),
      sends_(mode_ == PassMode::kFast ? PassSends() : context_->sends().count()) {}

void PassGraph::add_roots(const std::vector<at::Tensor>& roots) {
  for (const at::Tensor& root : roots) graph_.add_root(root);
  for (const auto& send : fast_sends_) graph_.add_pending(send);
}

void PassGraph::prepare() {
  graph_.prepare();
  nodes_ = report().nodes + context_->sends().edges()->size();
  if (sends_.count == 0) seal();
}

bool PassGraph::seal() {
  sealed_ = true;
  return graph_.seal();
}

SendNodePtr PassGraph::find_send(std::uint64_t message, std::uint32_t peer) const {
  const ContextSends& sends = context_->sends();
  auto send = mode_ == PassMode::kFast ? sends.find(message) : sends.find(message, sends_.end);
  if (send->message().peer == peer) return send;
  throw_invalid("a gradient or mark for {} came from a worker that it was not sent to",
                send->message().text());
}

void PassGraph::run() {
  if (const void* outer = StrayGradients::engine_pass()) stray_gradients_.begin_inside(outer);
  graph_.run();
}

std::vector<SendNodePtr> PassGraph::use_up(const std::vector<SendNodePtr>& marked) {
  std::vector<SendNodePtr> gone;
  for (const auto& send : fast_sends_) context_->sends().use_up(*send);  // every FAST pass needs all sends
  for (const auto& send : marked) {
    if (SendNodePtr removed = context_->sends().use(*send)) gone.push_back(std::move(removed));
  }
  return gone;
}

Error PassGraph::failure(const std::string& worker, std::vector<SendNodePtr> reached) const {
  std::vector<SendNodePtr> sends = fast_sends_;
  sends.insert(sends.end(), std::make_move_iterator(reached.begin()), std::make_move_iterator(reached.end()));
  return node_failure(graph_, worker, sends);
}

}  // namespace torchspan::autograd
