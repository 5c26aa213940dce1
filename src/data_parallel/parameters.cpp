#include "data_parallel/parameters.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/reducer_impl.h"
#include "engine/api/grad_field_sink.h"
#include "engine/api/graph_walk.h"

namespace torchspan::data_parallel {
namespace {

constexpr std::size_t kNamesInAMessage = 10;

Reducer::Replicas trainable(Reducer::Replicas replicas) {
  for (auto& replica : replicas) {
    std::erase_if(replica, [](const Parameter& parameter) { return !parameter.tensor.requires_grad(); });
  }
  return replicas;
}

/// Throws Error{kInvalid} if an optimizer steps the parameter during backward, which consumes its gradient
/// before it is averaged.
void check_not_stepped_in_backward(const Parameter& parameter) {
  if (!engine::has_gradient_use(parameter.tensor, engine::GradientUse::kSteps)) return;
  throw_invalid(
      "parameter '{}' is stepped in backward by an optimizer, before its gradient is averaged; destroy what "
      "step_in_backward() returned, and call step() after backward",
      parameter.name);
}

/// Gives the gradient of a slot to the reducer. LibTorch's engine does not pass the text of an exception on.
class SlotHook final : public engine::GradientHook {
 public:
  SlotHook(const at::Tensor& parameter, std::shared_ptr<engine::NativeEnginePasses> passes,
           std::weak_ptr<Reducer::Impl> reducer, std::size_t slot)
      : GradientHook(parameter, std::move(passes)), reducer_(std::move(reducer)), slot_(slot) {}
  std::shared_ptr<Reducer::Impl> reducer() const { return reducer_.lock(); }
  engine::GradientUse use() const override { return engine::GradientUse::kAverages; }
  void gradient_ready(engine::GradientSink& sink, const at::Tensor&) override {
    const auto reducer = reducer_.lock();
    if (!reducer) return;
    try {
      reducer->gradient_ready(sink, slot_);
    } catch (const std::exception& error) {
      if (const auto round = reducer->current()) round->note_reason(error.what());
      throw;
    }
  }

 private:
  const std::weak_ptr<Reducer::Impl> reducer_;
  const std::size_t slot_;
};

std::string on(bool flag) { return flag ? "true" : "false"; }

void check_replicas(const Reducer::Replicas& replicas) {
  if (replicas.empty() || replicas[0].empty()) {
    throw_invalid("there are no parameters, so there are no gradients to reduce");
  }
  bool trainable = false;
  std::map<const c10::TensorImpl*, std::string> listed;
  for (std::size_t r = 0; r < replicas.size(); ++r) {
    const std::vector<Parameter>& replica = replicas[r];
    const std::string of_replica = replicas.size() > 1 ? fmt::format(" of replica {}", r) : "";
    if (replica.size() != replicas[0].size()) {
      throw_invalid("one replica has {} parameters, another has {}", replicas[0].size(), replica.size());
    }
    for (std::size_t i = 0; i < replica.size(); ++i) {
      const Parameter& parameter = replica[i];
      const at::Tensor& like = replicas[0][i].tensor;
      const auto refuse = [&](const std::string& why) {
        throw_invalid("parameter '{}' {}", parameter.name, why);
      };
      if (!parameter.tensor.defined()) refuse("is undefined");
      const auto [first_entry, is_new] = listed.emplace(parameter.tensor.unsafeGetTensorImpl(),
                                                        fmt::format("'{}'{}", parameter.name, of_replica));
      if (!is_new) {
        throw_invalid(
            "parameter '{}'{} is the same tensor as {}; {}", parameter.name, of_replica, first_entry->second,
            replicas.size() > 1 ? "list it once, and give each replica its own copy" : "list it once");
      }
      check_not_stepped_in_backward(parameter);
      if (parameter.tensor.is_sparse()) refuse("is a sparse tensor; only its gradient may be sparse");
      if (parameter.tensor.requires_grad() && !parameter.tensor.is_leaf()) {
        refuse(
            "is not a leaf of the graph: it was computed from other tensors, so backward leaves no gradient "
            "in it");
      }
      const c10::Device device = parameter.tensor.device(), first = replicas[0][0].tensor.device();
      if (device != first) {
        throw_invalid(
            "parameter '{}' is on {}, but '{}' is on {}: a process averages the gradients of one device, so "
            "run one process for each device, or put the parts of a model that spans devices into a Pipeline",
            parameter.name, device.str(), replicas[0][0].name, first.str());
      }
      if (parameter.tensor.sizes() != like.sizes() || parameter.tensor.strides() != like.strides() ||
          parameter.tensor.scalar_type() != like.scalar_type() ||
          parameter.tensor.requires_grad() != like.requires_grad()) {
        refuse("differs between the replicas of this process in shape, strides, dtype or requires_grad");
      }
      trainable = trainable || parameter.tensor.requires_grad();
    }
  }
  if (!trainable) {
    throw_invalid("no parameter requires a gradient, so there is nothing to reduce; use the module as it is");
  }
}

}  // namespace

void DataParallelOptions::validate() const {
  const auto positive = [](double value, const std::string& name) {
    if (value > 0) return;
    throw_invalid("{} is {}; it must be above 0", name, value);
  };
  positive(bucket_cap_mb, "bucket_cap_mb");
  positive(first_bucket_mb, "first_bucket_mb");
  for (std::size_t i = 0; i < bucket_cap_mb_list.size(); ++i)
    positive(bucket_cap_mb_list[i], fmt::format("bucket_cap_mb_list[{}]", i));
  if (static_graph && partial_backward) {
    throw_invalid(
        "static_graph and partial_backward exclude each other: a static graph is learned from one whole "
        "backward pass");
  }
}

Agreement reducer_agreement(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                            const collective::Group& group) {
  Agreement mine;
  try {
    options.validate();
    check_replicas(replicas);
    for (const Parameter& parameter : replicas[0]) check_device(group, parameter.name, parameter.tensor);
  } catch (const Error& error) {
    mine.failure = error.message();
    return mine;
  }
  mine.settings = {{"the layout of this handshake", "1"},
                   {"bucket_cap_mb", fmt::format("{}", options.bucket_cap_mb)},
                   {"first_bucket_mb", fmt::format("{}", options.first_bucket_mb)},
                   {"bucket_cap_mb_list", fmt::format("[{}]", fmt::join(options.bucket_cap_mb_list, ", "))},
                   {"find_unused_parameters", on(options.find_unused_parameters)},
                   {"static_graph", on(options.static_graph)},
                   {"rebuild_buckets", on(options.rebuild_buckets)},
                   {"broadcast_buffers", on(options.broadcast_buffers)},
                   {"initial_sync", on(options.initial_sync)},
                   {"partial_backward", on(options.partial_backward)},
                   {"the number of replicas in a process", fmt::format("{}", replicas.size())}};
  for (const Parameter& parameter : replicas[0])
    mine.add(parameter.name, parameter.tensor, parameter.sparse_gradient);
  return mine;
}

ParameterSlots::ParameterSlots(const Reducer::Replicas& replicas)
    : replicas_(trainable(replicas)), count_(replicas_[0].size()) {
  for (const Parameter& parameter : replicas[0]) {
    if (!parameter.tensor.requires_grad()) frozen_.push_back(parameter);
  }
  for (std::size_t slot = 0; slot < size(); ++slot)
    slot_of_.emplace(tensor(slot).unsafeGetTensorImpl(), slot);
}

std::string ParameterSlots::names(const std::vector<std::size_t>& slots) const {
  std::string text;
  for (std::size_t i = 0; i < std::min(slots.size(), kNamesInAMessage); ++i) {
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", name(slots[i]));
  }
  if (slots.size() > kNamesInAMessage) text += fmt::format(" and {} more", slots.size() - kNamesInAMessage);
  return text;
}

std::vector<std::size_t> ParameterSlots::unreached_from(const std::vector<at::Tensor>& outputs) const {
  std::vector<bool> reached(size());
  for (const at::Tensor& leaf : engine::leaf_tensors(outputs)) {
    const auto found = slot_of_.find(leaf.unsafeGetTensorImpl());
    if (found != slot_of_.end()) reached[found->second] = true;
  }
  std::vector<std::size_t> unreached;
  for (std::size_t slot = 0; slot < size(); ++slot) {
    if (!reached[slot]) unreached.push_back(slot);
  }
  return unreached;
}

void ParameterSlots::check_frozen() const {
  for (const Parameter& parameter : frozen_) {
    if (!parameter.tensor.requires_grad()) continue;
    throw_invalid(
        "parameter '{}' required no gradient when it was wrapped, and requires one now; wrap the module "
        "again",
        parameter.name);
  }
}

void SlotHooks::attach(const std::weak_ptr<Reducer::Impl>& reducer) {
  reducer_ = reducer;
  hooked_.resize(slots_.size());
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) add_hook(slot);
}

void SlotHooks::add_hook(std::size_t slot) {
  const at::Tensor& parameter = slots_.tensor(slot);
  check_not_stepped_in_backward({.name = slots_.name(slot), .tensor = parameter});
  for (const engine::GradientHook* other : engine::gradient_hooks(parameter)) {
    if (other->use() == engine::GradientUse::kAverages) passes_->unite(other->passes());
  }
  auto node = torch::autograd::impl::grad_accumulator(parameter);
  const auto key = node->add_post_hook(std::make_unique<SlotHook>(parameter, passes_, reducer_, slot));
  hooked_[slot] = {std::move(node), key};
}

void SlotHooks::attach_again(const Buckets& buckets) {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    auto& [node, key] = hooked_[slot];
    if (torch::autograd::impl::try_get_grad_accumulator(slots_.tensor(slot)) == node) continue;
    if (!buckets.fits(slot)) continue;  // the next backward pass names it
    node->del_post_hook(key);
    add_hook(slot);
  }
}

void SlotHooks::detach() {
  for (const auto& [node, key] : hooked_) {
    if (node) node->del_post_hook(key);  // null where attach() failed before it
  }
  hooked_.clear();
}

bool SlotHooks::pass_reaches_parameters() const {
  return std::any_of(hooked_.begin(), hooked_.end(),
                     [](const auto& hooked) { return engine::pass_accumulates_at(*hooked.first); });
}

bool SlotHooks::is_shared(std::size_t slot) const {
  if (slot >= hooked_.size() || hooked_[slot].first->post_hooks().size() < 2) return false;
  const auto mine = reducer_.lock();
  bool shared = false;
  for (const auto& hook : hooked_[slot].first->post_hooks()) {
    const auto* found = dynamic_cast<const SlotHook*>(hook.get());
    const auto other = found == nullptr ? nullptr : found->reducer();
    if (!mine || !other || other == mine) continue;
    shared = true;
    if (!other->is_reducing() || other->context().group.ranks() == mine->context().group.ranks()) continue;
    throw_invalid(
        "parameter '{}' is averaged by two wrappers, over ranks {} and over ranks {}, in one backward pass; "
        "wrap it once, or run each pass through only one of them",
        slots_.name(slot), fmt::join(mine->context().group.ranks(), ", "),
        fmt::join(other->context().group.ranks(), ", "));
  }
  return shared;
}

bool SlotHooks::is_expected_elsewhere(std::size_t slot, const engine::GradientSink& sink) const {
  const auto mine = reducer_.lock();
  for (const auto& hook : hooked_[slot].first->post_hooks()) {
    const auto* found = dynamic_cast<const SlotHook*>(hook.get());
    const auto other = found == nullptr ? nullptr : found->reducer();
    if (mine && other && other != mine && other->context().group.ranks() == mine->context().group.ranks() &&
        other->expects_gradients(sink))
      return true;
  }
  return false;
}

std::string SlotHooks::describe_missing(const std::vector<std::size_t>& slots) const {
  const std::string names = slots_.names(slots);
  for (const std::size_t slot : slots) {
    const std::string why = why_unreachable(slot);
    if (!why.empty()) return fmt::format("{} ('{}' {})", names, slots_.name(slot), why);
  }
  return names;
}

std::string SlotHooks::why_unreachable(std::size_t slot) const {
  if (!slots_.tensor(slot).requires_grad()) {
    return "was frozen after it was wrapped (its requires_grad is false): wrap the module again, or set "
           "find_unused_parameters if training freezes and unfreezes parameters";
  }
  if (torch::autograd::impl::grad_accumulator(slots_.tensor(slot)) == hooked_[slot].first) return {};
  return "was converted to another dtype or device after it was wrapped: convert the module before that";
}

}  // namespace torchspan::data_parallel
