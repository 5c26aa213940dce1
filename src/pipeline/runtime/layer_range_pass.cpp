#include "pipeline/runtime/layer_range_pass.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include "pipeline/runtime/kept_buffers.h"
#include "pipeline/runtime/moved.h"

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
  for (const auto& [link, activation] : inputs) add(activation.batch);
  if (loss) add(loss->target);
  return watch;
}

void check_unchanged(const InPlaceWatch& watch) {
  if (!watch.changed()) return;
  throw Error(
      ErrorKind::kInvalid,
      "a layer changed the input of a checkpointed layer range in place, or the loss changed its target, "
      "so its forward cannot be recomputed: make the operation out of place, or use "
      "ActivationCheckpoint::kNever");
}

/// Whether a link stays on one worker. measure_costs() runs the ranges of all workers in one process.
bool stays_on_worker(const Plan& plan, const Link& link) {
  const auto worker_of = [&](int range) { return plan.layer_ranges[static_cast<std::size_t>(range)].worker; };
  return worker_of(link.from) == worker_of(link.to);
}

/// Moves what links transfer to the device of the layers; if they have none, what comes from another worker to the CPU.
/// From there it arrives on the CPU, or where the layers were when the pipeline was created.
void move_linked_inputs(const LocalPipeline& local, std::map<int, Activation>& inputs,
                        std::optional<c10::Device> device) {
  for (auto& [link, activation] : inputs) {
    if (link == kOutside) continue;
    const bool stays = stays_on_worker(local.plan, local.plan.links[static_cast<std::size_t>(link)]);
    if (!device && (stays || !device::has_streams())) continue;
    for (c10::IValue& member : activation.batch.members) {
      if (is_defined_tensor(member)) member = moved(member.toTensor(), device.value_or(c10::kCPU));
    }
  }
}

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

LayerRangePass::LayerRangePass(const LocalPipeline& local, int range, int micro_batch, RunMode mode)
    : local_(local), mode_(mode), runner_(local, range, micro_batch, mode), repeated_uses_(local) {
  if (range == 0) ++missing_.inputs;
  for (const Link& link : local.plan.links) missing_.inputs += link.to == range ? 1 : 0;
}

void LayerRangePass::put_input(int link, Activation activation) {
  if (!inputs_.emplace(link, std::move(activation)).second) {
    throw Error(ErrorKind::kInvalid, fmt::format("micro-batch {} reached layer range {} twice by link {}",
                                                 runner_.micro_batch(), runner_.range_index(), link));
  }
  --missing_.inputs;
}

std::map<int, Activation> LayerRangePass::activation_of(LayerRangeOutputs& outputs) const {
  std::map<int, Activation> all;
  for (auto& [link, batch] : outputs.batches) {
    Activation& activation = all[link];
    activation.batch.tuple = batch.tuple;
    activation.batch.unsplit = batch.unsplit;
    for (c10::IValue& member : batch.members) {
      bool wants = false;
      if (is_defined_tensor(member)) {
        const at::Tensor& tensor = member.toTensor();
        wants = needs_backward_ && (repeats_range() ? can_have_gradient(tensor) : tensor.requires_grad());
        activation.batch.members.push_back(tensor.detach());
      } else {
        activation.batch.members.push_back(std::move(member));
      }
      activation.wants_gradient.push_back(wants ? 1 : 0);
    }
  }
  return all;
}

std::map<int, Activation> LayerRangePass::forward(std::optional<MicroBatchLoss> loss) {
  const StepPartScope part(runner_.part(StepPart::Kind::kForward), mode_.unordered);
  loss_ = std::move(loss);
  move_linked_inputs(local_, inputs_, local_.device_of_range(runner_.range_index()));
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
    const bool selects = mode_.recompute && mode_.gradients && !repeats_range();
    outputs = runner_.run(graph_.attach_inputs(inputs_, mode_.gradients), loss_, false,
                          selects ? &repeated_uses_ : nullptr);
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
  std::map<int, Activation> activation = activation_of(outputs);
  for (const auto& [link, load] : activation) {
    if (load.wants_any() && !(link == kOutside && loss_)) ++missing_.gradients;
  }
  if (!repeats_range()) {
    for (auto& [link, load] : inputs_) load.batch = Batch();  // wants_gradient stays, for the backward
  } else if (mode_.offloader != nullptr && needs_backward_) {
    offloaded_.put(*mode_.offloader, inputs_);
  }
  forward_done_ = true;
  communicates_ = part.communicated();
  return activation;
}

void LayerRangePass::put_gradients(int link, std::vector<at::Tensor> gradients) {
  if (!gradients_.emplace(link, std::move(gradients)).second) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("gradients of micro-batch {} arrived twice at layer range {} by link {}",
                            runner_.micro_batch(), runner_.range_index(), link));
  }
  --missing_.gradients;
}

void LayerRangePass::recompute() {
  const StepPartScope part(runner_.part(StepPart::Kind::kRepeatedForward),
                           communicates_ ? mode_.unordered : kUnlikeForward);
  offloaded_.restore(inputs_);
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
    repeated_uses_.repeat(runner_);
  }
  for (auto& [link, activation] : inputs_) activation.batch = Batch();
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
