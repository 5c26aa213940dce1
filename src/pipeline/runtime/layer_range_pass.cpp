#include "pipeline/runtime/layer_range_pass.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/runtime/kept_buffers.h"

namespace torchspan::pipeline {
namespace {

bool is_tensor(const c10::IValue& member) { return member.isTensor() && member.toTensor().defined(); }

bool can_have_gradient(const at::Tensor& tensor) { return tensor.is_floating_point() || tensor.is_complex(); }

/// A layer changed an input that must be there unchanged to compute the forward again.
class InPlaceWatch {
 public:
  explicit InPlaceWatch(const std::map<int, Activation>& inputs) {
    for (const auto& [link, activation] : inputs) {
      for (const c10::IValue& member : activation.batch.members) {
        if (is_tensor(member)) versions_.emplace_back(member.toTensor(), member.toTensor()._version());
      }
    }
  }
  void check() const {
    for (const auto& [tensor, version] : versions_) {
      if (static_cast<std::uint32_t>(tensor._version()) == version) continue;
      throw Error(
          ErrorKind::kInvalid,
          "a layer changed the input of a checkpointed layer range in place, so its forward cannot be "
          "recomputed: make the operation out of place, or use ActivationCheckpoint::kNever");
    }
  }

 private:
  std::vector<std::pair<at::Tensor, std::uint32_t>> versions_;
};

/// Autocast keeps its casts of weights: those made without a graph would hide the weights from a later
/// forward, those of a repeated forward would outlive an optimizer's step.
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

bool Activation::wants_any() const {
  return std::any_of(wants_gradient.begin(), wants_gradient.end(),
                     [](std::uint8_t wants) { return wants != 0; });
}

/// The root of a layer range's graph: keeps the gradients that reach it. Its outputs are not leaves, so a
/// layer may change them in place.
class LayerRangePass::Received final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }
  std::string name() const override { return "torchspan::pipeline::Received"; }
  at::Tensor gradient(std::uint32_t input) const {
    return input < gradients_.size() ? gradients_[input] : at::Tensor();
  }

 private:
  torch::autograd::variable_list gradients_;
};

/// The outputs of a layer range, with their graph.
struct LayerRangePass::Outputs {
  std::map<int, Batch> batches;
  at::Tensor loss;
};

LayerRangePass::LayerRangePass(const LocalPipeline& local, int range, int micro_batch, RunMode mode)
    : local_(local), range_(range), micro_batch_(micro_batch), mode_(mode) {
  if (range == 0) ++missing_inputs_;
  for (const Link& link : local.plan.links) missing_inputs_ += link.to == range ? 1 : 0;
}

void LayerRangePass::put_input(int link, Activation activation) {
  if (!inputs_.emplace(link, std::move(activation)).second) {
    throw Error(ErrorKind::kInvalid, fmt::format("micro-batch {} reached layer range {} twice by link {}",
                                                 micro_batch_, range_, link));
  }
  --missing_inputs_;
}

std::string LayerRangePass::range_name() const {
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(range_)];
  std::string name = local_.plan.describe(range.first);
  if (range.last != range.first) name += " to " + local_.plan.describe(range.last);
  return name;
}

void LayerRangePass::fail(const std::string& where, const char* phase) const {
  const ExceptionStory story = describe(std::current_exception());
  throw Error(ErrorKind::kRemoteFailure,
              fmt::format("step {} of pipeline '{}' failed in the {} of micro-batch {} through {}: {}",
                          mode_.step, local_.options.name, phase, micro_batch_, where, story.text))
      .with_worker(local_.worker.name())
      .with_frame({local_.worker.name(), where, story.type, story.text});
}

std::map<int, Activation> LayerRangePass::attach_inputs() {
  std::map<int, Activation> attached;
  received_ = std::make_shared<Received>();
  for (const auto& [link, activation] : inputs_) {
    Activation& here = attached[link];
    here = activation;
    for (std::size_t i = 0; i < here.batch.members.size(); ++i) {
      if (!is_tensor(here.batch.members[i])) continue;
      at::Tensor tensor = here.batch.members[i].toTensor().detach();
      if (mode_.gradients && here.wants_gradient[i] != 0)
        torch::autograd::create_gradient_edge(tensor, received_);
      here.batch.members[i] = std::move(tensor);
    }
  }
  return attached;
}

/// The random numbers of one use; the loss comes after the last.
SeededScope LayerRangePass::seeded_scope(int order) const {
  const auto& seed = local_.options.seed;
  return SeededScope(seed ? std::optional(seed_of_use(*seed, mode_.step, order, micro_batch_))
                          : std::nullopt);
}

Batch LayerRangePass::run_use(int order, const Batch& input, std::map<std::string, at::Tensor> pops,
                              std::map<std::string, at::Tensor>& stashed, bool repeated) {
  const LayerUse& use = local_.uses[static_cast<std::size_t>(order)];
  const BuiltLayer& layer = local_.layers[static_cast<std::size_t>(use.layer)];
  try {
    if (layer.module) {
      for (const auto& module : layer.module->modules()) {
        if (auto* statistics = dynamic_cast<StepStatistics*>(module.get()))
          statistics->begin_use(order, repeated);
      }
    }
    Skips skips(std::move(pops), use.stashes);
    Batch output;
    {
      const SeededScope random = seeded_scope(order);
      output = use.call(layer.object.get(), input, skips);
    }
    if (const std::string neglected = skips.neglected(); !neglected.empty()) {
      throw Error(ErrorKind::kInvalid, "skips: " + neglected);
    }
    stashed = std::move(skips.stashed());
    return output;
  } catch (...) {
    fail(local_.plan.describe(order), repeated ? "repeated forward" : "forward");
  }
}

LayerRangePass::Outputs LayerRangePass::run_layers(const std::map<int, Activation>& inputs, bool repeated) {
  const Plan& plan = local_.plan;
  const LayerRange& range = plan.layer_ranges[static_cast<std::size_t>(range_)];
  Outputs outputs;
  std::map<std::pair<int, std::string>, at::Tensor> aside;  // by the order that pops it, and the name
  for (const auto& [link, activation] : inputs) {
    if (link == kOutside || plan.links[static_cast<std::size_t>(link)].skip.empty()) continue;
    const Link& skip = plan.links[static_cast<std::size_t>(link)];
    aside[{skip.popped_by, skip.skip}] = Member<at::Tensor>::to(activation.batch.members.at(0));
  }
  Batch batch = inputs.at(range_ == 0 ? kOutside : range_ - 1).batch;
  for (int order = range.first; order <= range.last; ++order) {
    std::map<std::string, at::Tensor> pops, stashed;
    for (const std::string& name : local_.uses[static_cast<std::size_t>(order)].pops) {
      pops.emplace(name, std::move(aside[{order, name}]));
    }
    batch = run_use(order, batch, std::move(pops), stashed, repeated);
    for (const LocalSkip& skip : plan.local_skips) {
      if (skip.stashed_by == order) aside[{skip.popped_by, skip.name}] = stashed.at(skip.name);
    }
    for (std::size_t link = 0; link < plan.links.size(); ++link) {
      const Link& skip = plan.links[link];
      if (skip.skip.empty() || skip.stashed_by != order || skip.from != range_) continue;
      outputs.batches[static_cast<int>(link)].members = {Member<at::Tensor>::from(stashed.at(skip.skip))};
    }
  }
  if (loss_) {
    try {
      const SeededScope random = seeded_scope(static_cast<int>(plan.invocations.size()));
      outputs.loss = (*loss_->loss)(batch, loss_->target);
      if (!outputs.loss.defined() || outputs.loss.numel() != 1) {
        throw Error(ErrorKind::kInvalid,
                    "the loss must be a tensor of one element, the mean over the micro-batch");
      }
    } catch (...) {
      fail("the loss", repeated ? "repeated forward" : "forward");
    }
  }
  outputs.batches[range_ == local_.last_layer_range() ? kOutside : range_] = std::move(batch);
  return outputs;
}

bool LayerRangePass::any_layer_learns() const {
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(range_)];
  for (int order = range.first; order <= range.last; ++order) {
    const LayerUse& use = local_.uses[static_cast<std::size_t>(order)];
    const auto& module = local_.layers[static_cast<std::size_t>(use.layer)].module;
    if (!module) continue;
    for (const at::Tensor& parameter : module->parameters()) {
      if (parameter.requires_grad()) return true;
    }
  }
  return false;
}

void LayerRangePass::keep_exits(const Outputs& outputs) {
  exits_.clear();
  for (const auto& [link, batch] : outputs.batches) {
    for (std::size_t i = 0; i < batch.members.size(); ++i) {
      if (!is_tensor(batch.members[i]) || !batch.members[i].toTensor().requires_grad()) continue;
      exits_.push_back({link, i, torch::autograd::impl::gradient_edge(batch.members[i].toTensor())});
    }
  }
  if (!outputs.loss.defined()) return;
  if (!outputs.loss.requires_grad()) return;
  loss_edge_ = torch::autograd::impl::gradient_edge(outputs.loss);
  loss_gradient_ = at::full_like(outputs.loss.detach(), loss_->weight);
}

std::map<int, Activation> LayerRangePass::activation_of(Outputs& outputs) const {
  std::map<int, Activation> all;
  for (auto& [link, batch] : outputs.batches) {
    Activation& activation = all[link];
    activation.batch.tuple = batch.tuple;
    activation.batch.unsplit = batch.unsplit;
    for (c10::IValue& member : batch.members) {
      bool wants = false;
      if (is_tensor(member)) {
        const at::Tensor& tensor = member.toTensor();
        wants = needs_backward_ && (mode_.recompute ? can_have_gradient(tensor) : tensor.requires_grad());
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
  loss_ = std::move(loss);
  bool learns = any_layer_learns();
  for (const auto& [link, activation] : inputs_) learns = learns || activation.wants_any();
  needs_backward_ = mode_.gradients && learns;
  // A graph may begin at tensors of the user's own, which no layer's parameters show. Where nothing else
  // learns, recording tells, and costs nothing if there are none.
  const bool records = mode_.gradients && (!mode_.recompute || !learns);
  std::optional<InPlaceWatch> watch;
  if (mode_.recompute && mode_.gradients) {
    if (!local_.options.seed) random_ = RandomState::capture();
    thread_state_.emplace();
    watch.emplace(inputs_);
  }
  Outputs outputs;
  {
    const torch::autograd::AutoGradMode mode(records);
    std::optional<NoAutocastCache> uncached;
    if (!records || mode_.recompute) uncached.emplace();
    outputs = run_layers(attach_inputs(), false);
  }
  if (records) keep_exits(outputs);
  if (records) needs_backward_ = needs_backward_ || !exits_.empty() || loss_edge_.is_valid();
  if (mode_.recompute) {
    exits_.clear();
    loss_edge_ = {};
  }
  try {
    if (watch && needs_backward_) watch->check();
  } catch (...) {
    fail(range_name(), "forward");
  }
  if (outputs.loss.defined()) loss_value_ = outputs.loss.detach().item<double>();
  std::map<int, Activation> activation = activation_of(outputs);
  for (const auto& [link, load] : activation) {
    if (load.wants_any() && !(link == kOutside && loss_)) ++missing_gradients_;
  }
  if (!mode_.recompute) {
    for (auto& [link, load] : inputs_) load.batch = Batch();  // what wants gradients is remembered
  }
  forward_done_ = true;
  return activation;
}

void LayerRangePass::put_gradients(int link, std::vector<at::Tensor> gradients) {
  if (!gradients_.emplace(link, std::move(gradients)).second) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("gradients of micro-batch {} came twice to layer range {} by link {}",
                            micro_batch_, range_, link));
  }
  --missing_gradients_;
}

void LayerRangePass::recompute() {
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(range_)];
  KeptBuffers buffers(local_, range);
  const at::ThreadLocalStateGuard state(*thread_state_);
  const torch::autograd::AutoGradMode mode(true);
  const NoAutocastCache uncached;
  const RandomScope outer;
  if (random_) random_->restore();
  const Outputs outputs = run_layers(attach_inputs(), true);
  keep_exits(outputs);
  for (auto& [link, activation] : inputs_) activation.batch = Batch();
  recomputed_ = true;
  buffers.restore();
}

std::map<int, std::vector<at::Tensor>> LayerRangePass::backward() {
  if (can_recompute()) recompute();
  torch::autograd::edge_list roots;
  torch::autograd::variable_list root_gradients;
  for (const Exit& exit : exits_) {
    const auto found = gradients_.find(exit.link);
    if (found == gradients_.end() || exit.member >= found->second.size()) continue;
    if (!found->second[exit.member].defined()) continue;
    roots.push_back(exit.edge);
    root_gradients.push_back(std::move(found->second[exit.member]));
  }
  if (loss_edge_.is_valid()) {
    roots.push_back(loss_edge_);
    root_gradients.push_back(loss_gradient_);
  }
  try {
    if (!roots.empty()) {
      torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, false, false, true);
    }
  } catch (...) {
    fail(range_name(), "backward");
  }
  std::map<int, std::vector<at::Tensor>> back;
  std::uint32_t input = 0;
  for (const auto& [link, activation] : inputs_) {
    if (!activation.wants_any()) continue;
    std::vector<at::Tensor>& gradients = back[link];
    for (const std::uint8_t wants : activation.wants_gradient) {
      gradients.push_back(wants != 0 ? received_->gradient(input++) : at::Tensor());
    }
  }
  exits_.clear();
  loss_edge_ = {};
  received_.reset();
  gradients_.clear();
  inputs_.clear();
  return back;
}

}  // namespace torchspan::pipeline
