#include "pipeline/runtime/layer_range_pass.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <torchspan/detail/device/streams.h>

#include "core/api/throw_invalid.h"
#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {
namespace {

/// In StepPartScope.
constexpr const char* kUnlikeForward =
    "the forward called no operation of a group, so it may be repeated whenever its worker is idle; call the "
    "same "
    "operations in both, or use ActivationCheckpoint::kNever";

bool can_have_gradient(const at::Tensor& tensor) { return tensor.is_floating_point() || tensor.is_complex(); }

/// Watches the inputs of a range whose forward is repeated, and the target of its loss.
InPlaceWatch watch_inputs(const std::map<int, Activation>& inputs,
                          const std::optional<MicroBatchLoss>& loss) {
  InPlaceWatch watch;
  const auto add = [&watch](const Batch& batch) {
    for (const c10::IValue& member : batch.members) {
      if (is_defined_tensor(member)) watch.add(member.toTensor());
    }
  };
  for (const auto& [link, activation] : inputs) add(activation);
  if (loss) add(loss->target);
  return watch;
}

void check_unchanged(const InPlaceWatch& watch) {
  if (!watch.changed()) return;
  throw_invalid(
      "a layer changed the input of a checkpointed layer range in place, or the loss changed its target, so "
      "its forward cannot be recomputed: make the operation out of place, or use "
      "ActivationCheckpoint::kNever");
}

/// Whether a link stays on one worker. measure_costs() runs the ranges of all workers in one process.
bool stays_on_worker(const Plan& plan, const Link& link) {
  const auto worker_of = [&](int range) { return plan.layer_ranges[static_cast<std::size_t>(range)].worker; };
  return worker_of(link.from) == worker_of(link.to);
}

/// Modules in evaluation mode leave their buffers as they are.
bool any_trains(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& each) { return each->is_training(); });
}

/// Restores the buffers of a layer range's modules (running statistics and the like) to their values at
/// construction: a recomputed forward must not count twice.
class KeptBuffers {
 public:
  KeptBuffers(const LocalPipeline& local, const LayerRange& range) {
    for (int order = range.first; order <= range.last; ++order) {
      const LayerUse& use = local.uses[static_cast<std::size_t>(order)];
      const auto& module = local.layers[static_cast<std::size_t>(use.layer)].module;
      if (!module || !any_trains(*module)) continue;
      for (const at::Tensor& buffer : module->buffers()) kept_.emplace_back(buffer, buffer.detach().clone());
    }
  }
  /// If an exception ends the scope, restores the rest and does not throw.
  ~KeptBuffers() {
    while (!kept_.empty()) {
      try {
        restore();
      } catch (const std::exception&) {  // the scope's exception is the one to report
        kept_.pop_back();
      }
    }
  }
  /// Throws LibTorch's error if the forward changed a buffer's shape.
  void restore() {
    const torch::autograd::AutoGradMode mode(false);
    // In reverse order, because a buffer may be listed twice. Without changing its version, because the graph
    // may have saved the buffer.
    for (; !kept_.empty(); kept_.pop_back()) kept_.back().first.variable_data().copy_(kept_.back().second);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  ///< the buffer, its former value
};

/// Disables autocast's cache of cast weights: casts made without a graph would hide the weights from a later
/// forward, and casts of a repeated forward would outlive the optimizer's step.
class NoAutocastCache {
 public:
  NoAutocastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  const bool before_ = at::autocast::is_autocast_cache_enabled();
};

}  // namespace

/// The node that all inputs lead to: keeps their gradients.
class PassGraph::InputNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }
  std::string name() const override { return "torchspan::pipeline::Received"; }
  void drop() { gradients_.clear(); }
  at::Tensor gradient(std::uint32_t input) const {
    return input < gradients_.size() ? gradients_[input] : at::Tensor();
  }

 private:
  torch::autograd::variable_list gradients_;
};

std::map<int, Activation> PassGraph::attach_inputs(const std::map<int, Activation>& inputs, bool records) {
  std::map<int, Activation> attached;
  input_node_ = engine::make_node<InputNode>();
  for (const auto& [link, activation] : inputs) {
    Activation& here = attached[link];
    here = activation;
    for (std::size_t i = 0; i < here.members.size(); ++i) {
      if (!is_defined_tensor(here.members[i])) continue;
      at::Tensor tensor = here.members[i].toTensor().detach();
      if (records && here.wants_gradient[i] != 0) torch::autograd::create_gradient_edge(tensor, input_node_);
      here.members[i] = std::move(tensor);
    }
  }
  return attached;
}

void PassGraph::keep_edges(const LayerRangeOutputs& outputs, double loss_weight) {
  exits_.clear();
  for (const auto& [link, batch] : outputs.batches) {
    for (std::size_t i = 0; i < batch.members.size(); ++i) {
      if (!is_defined_tensor(batch.members[i]) || !batch.members[i].toTensor().requires_grad()) continue;
      exits_.push_back({link, i, torch::autograd::impl::gradient_edge(batch.members[i].toTensor())});
    }
  }
  if (!outputs.loss.defined() || !outputs.loss.requires_grad()) return;
  loss_edge_ = torch::autograd::impl::gradient_edge(outputs.loss);
  loss_gradient_ = at::full_like(outputs.loss.detach(), loss_weight);
}

void PassGraph::drop_edges() {
  exits_.clear();
  loss_edge_ = {};
}

/// Nodes that wait for the second part of a backward own the input node.
void PassGraph::drop_inputs() {
  static_cast<InputNode*>(input_node_.get())->drop();
  input_node_ = {};
}

PassGraph::Roots PassGraph::take_roots(std::map<int, std::vector<at::Tensor>>& gradients) const {
  Roots roots;
  for (const Exit& exit : exits_) {
    const auto found = gradients.find(exit.link);
    if (found == gradients.end() || exit.member >= found->second.size()) continue;
    if (!found->second[exit.member].defined()) continue;
    roots.edges.push_back(exit.edge);
    // From another worker it may arrive on the CPU.
    roots.gradients.push_back(moved(std::move(found->second[exit.member]),
                                    exit.edge.function->input_metadata(exit.edge.input_nr).device()));
  }
  if (loss_edge_.is_valid()) {
    roots.edges.push_back(loss_edge_);
    roots.gradients.push_back(loss_gradient_);
  }
  return roots;
}

void PassGraph::backward(std::map<int, std::vector<at::Tensor>>& gradients) {
  const Roots roots = take_roots(gradients);
  if (roots.edges.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, false, false, true);
}

void PassGraph::backward_inputs(std::map<int, std::vector<at::Tensor>>& gradients) {
  Roots roots = take_roots(gradients);
  auto two_parts = std::make_unique<TwoParts>(input_node_);
  for (std::size_t root = 0; root < roots.edges.size(); ++root)
    two_parts->pass.add_root(std::move(roots.edges[root]), std::move(roots.gradients[root]));
  drop_edges();
  two_parts->pass.run_inputs();
  two_parts_ = std::move(two_parts);
}

void PassGraph::backward_weights() {
  const std::unique_ptr<TwoParts> two_parts = std::move(two_parts_);
  two_parts->pass.run_weights();
  two_parts->sink.end()->wait();  // for hooks of parameters that hold the end of the pass
}

std::map<int, std::vector<at::Tensor>> PassGraph::input_gradients(
    const std::map<int, Activation>& inputs) const {
  const auto* input_node = static_cast<const InputNode*>(input_node_.get());
  std::map<int, std::vector<at::Tensor>> all;
  std::uint32_t input = 0;
  for (const auto& [link, activation] : inputs) {
    if (!activation.wants_any()) continue;
    std::vector<at::Tensor>& gradients = all[link];
    for (const std::uint8_t wants : activation.wants_gradient) {
      gradients.push_back(wants != 0 ? input_node->gradient(input++) : at::Tensor());
    }
  }
  return all;
}

LayerRangePass::LayerRangePass(const LocalPipeline& local, int range, int micro_batch, const RunMode& mode)
    : local_(local), mode_(mode), runner_(local, range, micro_batch, mode) {
  if (range == 0) ++missing_inputs_;
  for (const Link& link : local.plan.links) missing_inputs_ += link.to == range ? 1 : 0;
}

void LayerRangePass::put_input(int link, Activation activation) {
  if (!inputs_.emplace(link, std::move(activation)).second) {
    throw_invalid("micro-batch {} reached layer range {} twice by link {}", runner_.micro_batch(),
                  runner_.range_index(), link);
  }
  --missing_inputs_;
}

/// Moves what links transfer to the device of the layers; if they have none, what comes from another worker to the CPU.
/// From there it arrives on the CPU, or where the layers were when the pipeline was created.
void LayerRangePass::move_inputs() {
  const std::optional<c10::Device> device = local_.device_of_range(runner_.range_index());
  for (auto& [link, activation] : inputs_) {
    if (link == kOutside) continue;
    const bool stays = stays_on_worker(local_.plan, local_.plan.links[static_cast<std::size_t>(link)]);
    if (!device && (stays || !device::has_streams())) continue;
    for (c10::IValue& member : activation.members) {
      if (is_defined_tensor(member)) member = moved(member.toTensor(), device.value_or(c10::kCPU));
    }
  }
}

/// Moves the tensors that are on devices with streams to host memory. Not the pipeline's own input, which the caller of the
/// step holds.
void LayerRangePass::offload_inputs() {
  for (auto& [link, activation] : inputs_) {
    if (link == kOutside) continue;
    for (std::size_t member = 0; member < activation.members.size(); ++member) {
      c10::IValue& value = activation.members[member];
      if (!is_defined_tensor(value) || value.toTensor().layout() != at::kStrided ||
          !device::has_streams(value.toTensor().device()))
        continue;
      at::Tensor tensor = value.toTensor();
      value = c10::IValue();
      offloaded_.push_back({link, member, mode_.offloader->offload(std::move(tensor))});
    }
  }
}

void LayerRangePass::prefetch() {
  for (Offloaded& one : offloaded_) one.tensor.prefetch();
}

/// Turns the outputs into what links transfer, without graphs.
std::map<int, Activation> LayerRangePass::activations_of(LayerRangeOutputs& outputs) const {
  std::map<int, Activation> all;
  for (auto& [link, batch] : outputs.batches) {
    Activation& activation = all[link] = {std::move(batch), {}};
    for (c10::IValue& member : activation.members) {
      bool wants = false;
      if (is_defined_tensor(member)) {
        const at::Tensor& tensor = member.toTensor();
        wants = needs_backward_ && (repeats_range() ? can_have_gradient(tensor) : tensor.requires_grad());
        member = tensor.detach();
      }
      activation.wants_gradient.push_back(wants ? 1 : 0);
    }
  }
  return all;
}

std::map<int, Activation> LayerRangePass::forward(std::optional<MicroBatchLoss> loss) {
  const StepPartScope part(runner_.part(StepPart::Kind::kForward), mode_.unordered);
  loss_ = std::move(loss);
  move_inputs();
  bool learns = runner_.any_layer_learns();
  for (const auto& [link, activation] : inputs_) learns = learns || activation.wants_any();
  needs_backward_ = mode_.gradients && learns;
  // A graph may begin at the user's own tensors, which are not among the layers' parameters. Where nothing
  // else learns, recording the graph finds them; it costs nothing if there are none.
  const bool records = mode_.gradients && (!repeats_range() || !learns);
  std::optional<InPlaceWatch> watch;
  if (mode_.recompute && mode_.gradients) {
    thread_state_ = ThreadState{};
    if (repeats_range()) {
      if (!local_.options.seed) thread_state_->random = RandomState::capture();
      watch = watch_inputs(inputs_, loss_);
    }
  }
  LayerRangeOutputs outputs;
  {
    const torch::autograd::AutoGradMode mode(records);
    std::optional<NoAutocastCache> uncached;
    if (!records || mode_.recompute) uncached.emplace();
    outputs = runner_.run(graph_.attach_inputs(inputs_, mode_.gradients), loss_, false);
  }
  if (records) {
    graph_.keep_edges(outputs, loss_ ? loss_->weight : 0);
    needs_backward_ = needs_backward_ || graph_.has_edges();
  }
  if (repeats_range()) graph_.drop_edges();
  try {
    if (watch && needs_backward_) check_unchanged(*watch);
  } catch (...) {
    runner_.fail_range("forward");
  }
  // A copy: the loss may be in a storage of the size of the outputs (mse_loss), and its function may reuse its tensor.
  if (outputs.loss.defined()) loss_value_ = outputs.loss.detach().clone();
  std::map<int, Activation> activations = activations_of(outputs);
  for (const auto& [link, activation] : activations) {
    if (activation.wants_any() && !(link == kOutside && loss_)) ++missing_gradients_;
  }
  if (!repeats_range()) {
    for (auto& [link, activation] : inputs_)
      activation.members.clear();  // wants_gradient stays, for the backward
  } else if (mode_.offloader != nullptr && needs_backward_) {
    offload_inputs();
  }
  forward_done_ = true;
  communicates_ = part.communicated();
  return activations;
}

void LayerRangePass::put_gradients(int link, std::vector<at::Tensor> gradients) {
  if (!gradients_.emplace(link, std::move(gradients)).second) {
    throw_invalid("gradients of micro-batch {} arrived twice at layer range {} by link {}",
                  runner_.micro_batch(), runner_.range_index(), link);
  }
  --missing_gradients_;
}

void LayerRangePass::recompute() {
  const StepPartScope part(runner_.part(StepPart::Kind::kRepeatedForward),
                           communicates_ ? mode_.unordered : kUnlikeForward);
  for (Offloaded& one : offloaded_) inputs_.at(one.link).members[one.member] = one.tensor.take();
  offloaded_.clear();
  KeptBuffers buffers(local_, runner_.range());
  device::AutocastScope autocast;
  const at::ThreadLocalStateGuard state(thread_state_->torch);
  if (thread_state_->autocast.enabled()) autocast.enter(thread_state_->autocast);
  const torch::autograd::AutoGradMode mode(true);
  const NoAutocastCache uncached;
  const RandomScope outer;
  if (repeats_range()) {
    if (thread_state_->random) thread_state_->random->restore();
    graph_.keep_edges(runner_.run(graph_.attach_inputs(inputs_, mode_.gradients), loss_, true),
                      loss_ ? loss_->weight : 0);
  } else {
    runner_.repeat_kept();
  }
  for (auto& [link, activation] : inputs_) activation.members.clear();
  recomputed_ = true;
  buffers.restore();
}

bool LayerRangePass::any_input_wants() const {
  return std::any_of(inputs_.begin(), inputs_.end(),
                     [](const auto& input) { return input.second.wants_any(); });
}

void LayerRangePass::run_graph(StepPart::Kind kind, const std::function<void()>& part) {
  const StepPartScope scope(runner_.part(kind), mode_.unordered);
  try {
    part();
  } catch (...) {
    runner_.fail_range(name_of(kind));
  }
}

std::map<int, std::vector<at::Tensor>> LayerRangePass::backward() {
  if (can_recompute()) recompute();
  run_graph(StepPart::Kind::kBackward, [this] { graph_.backward(gradients_); });
  auto back = graph_.input_gradients(inputs_);
  graph_ = PassGraph();
  gradients_.clear();
  inputs_.clear();
  return back;
}

std::map<int, std::vector<at::Tensor>> LayerRangePass::backward_inputs() {
  if (!any_input_wants()) return {};
  if (can_recompute()) recompute();
  run_graph(StepPart::Kind::kInputGradient, [this] { graph_.backward_inputs(gradients_); });
  auto back = graph_.input_gradients(inputs_);
  graph_.drop_inputs();
  gradients_.clear();
  inputs_.clear();
  return back;
}

void LayerRangePass::backward_weights() {
  const bool second = graph_.is_between_parts();
  if (!second && can_recompute()) recompute();
  run_graph(StepPart::Kind::kWeightGradient, [this, second] {
    if (second) {
      graph_.backward_weights();
    } else {
      graph_.backward(gradients_);
    }
  });
}

}  // namespace torchspan::pipeline
