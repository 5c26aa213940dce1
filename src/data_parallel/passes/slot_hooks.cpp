#include "data_parallel/passes/slot_hooks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "engine/api/grad_field_sink.h"

namespace torchspan::data_parallel {
namespace {

class SlotHook final : public engine::GradientHook {
 public:
  SlotHook(const at::Tensor& parameter, std::shared_ptr<engine::NativeEnginePasses> passes,
           std::weak_ptr<SlotListener> listener, std::size_t slot)
      : GradientHook(parameter, std::move(passes)), listener_(std::move(listener)), slot_(slot) {}
  std::shared_ptr<SlotListener> listener() const { return listener_.lock(); }
  engine::GradientUse use() const override { return engine::GradientUse::kAverages; }
  void gradient_ready(engine::GradientSink& sink, const at::Tensor&) override {
    const auto listener = listener_.lock();
    if (!listener) return;
    try {
      listener->gradient_ready(sink, slot_);
    } catch (const std::exception& error) {
      listener->gradient_failed(error.what());
      throw;
    }
  }

 private:
  const std::weak_ptr<SlotListener> listener_;
  const std::size_t slot_;
};

}  // namespace

void check_not_stepped_in_backward(const Parameter& parameter) {
  if (!engine::has_gradient_use(parameter.tensor, engine::GradientUse::kSteps)) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("parameter '{}' is stepped in backward by an optimizer, before its gradient is averaged; "
                  "destroy what step_in_backward() returned, and call step() after backward",
                  parameter.name));
}

void SlotHooks::attach(const std::shared_ptr<SlotListener>& listener) {
  listener_ = listener;
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
  const auto key = node->add_post_hook(std::make_unique<SlotHook>(parameter, passes_, listener_, slot));
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
  const auto mine = listener_.lock();
  bool shared = false;
  for (const auto& hook : hooked_[slot].first->post_hooks()) {
    const auto* found = dynamic_cast<const SlotHook*>(hook.get());
    const auto other = found == nullptr ? nullptr : found->listener();
    if (!mine || !other || other == mine) continue;
    shared = true;
    if (!other->is_reducing() || other->ranks() == mine->ranks()) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' is averaged by two wrappers, over ranks {} and over ranks {}, in "
                    "one backward pass; wrap it once, or run each pass through only one of them",
                    slots_.name(slot), fmt::join(mine->ranks(), ", "), fmt::join(other->ranks(), ", ")));
  }
  return shared;
}

bool SlotHooks::is_expected_elsewhere(std::size_t slot, const engine::GradientSink& sink) const {
  const auto mine = listener_.lock();
  for (const auto& hook : hooked_[slot].first->post_hooks()) {
    const auto* found = dynamic_cast<const SlotHook*>(hook.get());
    const auto other = found == nullptr ? nullptr : found->listener();
    if (mine && other && other != mine && other->ranks() == mine->ranks() && other->expects_gradients(sink))
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
