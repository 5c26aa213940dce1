#include "optim/functional/rule.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <tuple>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/api/throw_invalid.h"
#include "device/api/tensors.h"
#include "optim/operators.h"

namespace torchspan::optim {
namespace {

constexpr const char* kMasterWeight = "master_weight";

/// Makes `master` the float32 copy of `parameter`. Elements that differ only by rounding keep their precise
/// value; others were changed by something else since the last step, and are read anew.
void refresh_master(at::Tensor& master, const at::Tensor& parameter) {
  if (!master.defined()) {
    master = parameter.to(at::kFloat);
    return;
  }
  const at::Tensor changed = master.to(parameter.scalar_type()).ne(parameter);
  if (parameter.is_cpu() && !changed.any().item<bool>()) return;
  master.copy_(at::where(changed, parameter.to(at::kFloat), master));
}

/// What parameters that are updated together have in common.
struct GroupKey {
  std::string device;
  at::ScalarType dtype;
  std::int64_t steps;
  bool has_slots;
  bool by_operator;
  friend bool operator<(const GroupKey& a, const GroupKey& b) {
    return std::tie(a.device, a.dtype, a.steps, a.has_slots, a.by_operator) <
           std::tie(b.device, b.dtype, b.steps, b.has_slots, b.by_operator);
  }
};

}  // namespace

RuleOptimizer::RuleOptimizer(std::string_view name, RuleSettings settings, std::vector<at::Tensor> parameters)
    : FunctionalOptimizer(std::string(name), std::move(parameters)),
      settings_(std::move(settings)),
      states_(this->parameters().size()) {}

bool RuleOptimizer::State::sparse() const {
  return std::any_of(slots.begin(), slots.end(),
                     [](const at::Tensor& slot) { return slot.defined() && slot.is_sparse(); });
}

bool RuleOptimizer::State::has_slots() const {
  return !slots.empty() &&
         std::all_of(slots.begin(), slots.end(), [](const at::Tensor& slot) { return slot.defined(); });
}

at::Tensor RuleOptimizer::make_slot(std::size_t, const at::Tensor& like) const {
  return at::zeros_like(like);
}

void RuleOptimizer::apply_sparse(const Operands<at::Tensor>&) const {
  throw Error(ErrorKind::kUnsupported, fmt::format("{} cannot use sparse gradients", name()));
}

std::string RuleOptimizer::refuse_sparse(const at::Tensor& parameter) const {
  if (parameter.is_complex()) return "which a complex parameter cannot use; use dense gradients";
  return refuse_sparse_rule();
}

bool RuleOptimizer::in_float32(const at::Tensor& parameter) const {
  return (settings_.float32_state || settings_.master_weights) && device::is_half(parameter.scalar_type());
}

bool RuleOptimizer::has_master(const at::Tensor& parameter) const {
  return settings_.master_weights && in_float32(parameter);
}

RuleOptimizer::Views RuleOptimizer::views(const at::Tensor& parameter, const at::Tensor& gradient,
                                          State& state) const {
  if (has_master(parameter)) {
    refresh_master(state.master, parameter);
    return {state.master, gradient.to(at::kFloat)};
  }
  if (in_float32(parameter)) return {parameter.to(at::kFloat), gradient.to(at::kFloat)};
  if (!parameter.is_complex()) return {parameter, gradient};
  return {at::view_as_real(parameter), at::view_as_real(gradient.resolve_conj())};
}

void RuleOptimizer::begin(State& state, const at::Tensor& like) const {
  if (state.slots.empty()) {
    for (std::size_t slot = 0; slot < settings_.slots.size(); ++slot)
      state.slots.push_back(make_slot(slot, like));
  }
  ++state.steps;
}

void RuleOptimizer::finish(at::Tensor& parameter, const at::Tensor& seen) const {
  if (in_float32(parameter)) parameter.copy_(seen);
  // The operations ran below the dispatch level that counts versions, so a step counts once.
  if (!hogwild_ && !parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
}

void RuleOptimizer::update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) {
  State& state = states_[index];
  Views seen = views(parameter, gradient, state);
  begin(state, seen.parameter);
  const Operands<at::Tensor> on{seen.parameter, seen.gradient, state.slots.data(),
                                static_cast<double>(state.steps)};
  explained(index, [&] { gradient.is_sparse() || state.sparse() ? apply_sparse(on) : apply(on); });
  finish(parameter, seen.parameter);
}

template <class Rule>
void RuleOptimizer::explained(std::size_t index, const Rule& rule) const {
  try {
    rule();
  } catch (const c10::Error& error) {
    const at::Tensor& parameter = parameters()[index];
    if (!device::is_half(parameter.scalar_type()) || in_float32(parameter)) throw;
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format(
            "{}: LibTorch cannot step {} in its own dtype ({}); set float32_state or master_weights in "
            "the optimizer's options",
            name(), describe(index), error.what_without_backtrace()));
  }
}

bool RuleOptimizer::can_update_together(std::size_t index, const at::Tensor& gradient) const {
  if (settings_.cpu_kernel && gradient.is_cpu()) return false;
  if (!can_index_with_int(gradient) || gradient.is_sparse() || states_[index].sparse()) return false;
  return settings_.foreach ? *settings_.foreach : gradient.is_cuda() || has_operator_for(gradient);
}

bool RuleOptimizer::can_use_operator(std::size_t index) const {
  const at::Tensor& parameter = parameters()[index];
  // Without elements: the operators of some releases fail for many tensors that have none.
  if (settings_.foreach || parameter.numel() == 0 || !parameter.is_non_overlapping_and_dense()) return false;
  const State& state = states_[index];
  at::Tensor like = state.master.defined() ? state.master : parameter;
  if (like.is_complex()) like = at::view_as_real(like);
  return std::all_of(state.slots.begin(), state.slots.end(), [&](const at::Tensor& slot) {
    return !slot.defined() || (slot.sizes() == like.sizes() && slot.strides() == like.strides());
  });
}

void RuleOptimizer::update_all(std::span<const at::Tensor> gradients) {
  at::AutoDispatchBelowADInplaceOrView below;
  std::map<GroupKey, std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (can_update_together(i, gradients[i])) {
      groups[{gradients[i].device().str(), gradients[i].scalar_type(), states_[i].steps,
              states_[i].has_slots(), can_use_operator(i)}]
          .push_back(i);
    } else {
      update(i, parameters()[i], gradients[i]);
    }
  }
  for (const auto& [like, indices] : groups) update_many(indices, gradients, like.by_operator);
}

void RuleOptimizer::update_many(const std::vector<std::size_t>& indices,
                                std::span<const at::Tensor> gradients, bool by_operator) {
  Tensors seen, directions;
  std::vector<Tensors> slots(settings_.slots.size());
  for (const std::size_t i : indices) {
    Views of_one = views(parameters()[i], gradients[i], states_[i]);
    begin(states_[i], of_one.parameter);
    seen.push_back(std::move(of_one.parameter));
    directions.push_back(std::move(of_one.gradient));
    for (std::size_t slot = 0; slot < slots.size(); ++slot) slots[slot].push_back(states_[i].slots[slot]);
  }
  const Operands<Tensors> on{seen, directions, slots.data(),
                             static_cast<double>(states_[indices.front()].steps)};
  explained(indices.front(), [&] {
    if (!by_operator || !apply_by_operator(on)) apply(on);
  });
  for (std::size_t k = 0; k < indices.size(); ++k) {
    for (std::size_t slot = 0; slot < slots.size(); ++slot) states_[indices[k]].slots[slot] = slots[slot][k];
    finish(parameters()[indices[k]], seen[k]);
  }
}

ParameterState RuleOptimizer::state(std::size_t index) const {
  const State& state = states_.at(index);
  ParameterState result;
  if (state.slots.empty() && state.steps == 0) return result;
  result.emplace("step", at::scalar_tensor(state.steps, at::kLong));
  if (state.master.defined()) result.emplace(kMasterWeight, state.master);
  for (std::size_t slot = 0; slot < state.slots.size(); ++slot) {
    if (state.slots[slot].defined()) result.emplace(settings_.slots[slot], state.slots[slot]);
  }
  return result;
}

void RuleOptimizer::load_state(std::size_t index, const ParameterState& state) {
  const auto fail = [&](const std::string& entry, const std::string& trouble) {
    throw_invalid("{}: the state '{}' of {} {}", name(), entry, describe(index), trouble);
  };
  if (state.empty()) {
    states_.at(index) = {};
    return;
  }
  const at::Tensor& parameter = parameters()[index];
  at::NoGradGuard no_grad;
  State fresh, loaded;
  const at::Tensor like = views(parameter, parameter, fresh).parameter;
  const auto steps = state.find("step");
  if (steps == state.end()) fail("step", "is missing");
  if (steps->second.numel() != 1) fail("step", "is not one number");
  loaded.steps = steps->second.item<std::int64_t>();
  if (loaded.steps < 0) fail("step", fmt::format("is {}, but it must be >= 0", loaded.steps));
  const auto copy_of = [&](const std::string& entry) {
    const auto found = state.find(entry);
    if (found == state.end())
      fail(entry, "is missing, because the state comes from an optimizer with other options");
    const at::Tensor& value = found->second;
    if (value.sizes() != like.sizes() || value.scalar_type() != like.scalar_type()) {
      fail(entry, fmt::format("has shape {}, {}, but it must have shape {}, {}", c10::str(value.sizes()),
                              c10::toString(value.scalar_type()), c10::str(like.sizes()),
                              c10::toString(like.scalar_type())));
    }
    if (!value.is_sparse()) return at::empty_like(like).copy_(value);
    return value.to(like.device(), like.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  };
  for (const std::string& slot : settings_.slots) loaded.slots.push_back(copy_of(slot));
  if (has_master(parameter)) loaded.master = copy_of(kMasterWeight);
  for (const auto& [entry, value] : state) {
    const bool known =
        entry == "step" || (entry == kMasterWeight && loaded.master.defined()) ||
        std::find(settings_.slots.begin(), settings_.slots.end(), entry) != settings_.slots.end();
    if (!known) fail(entry, "does not belong to this optimizer with its options");
  }
  states_.at(index) = std::move(loaded);
}

at::Tensor with_values(const at::Tensor& like, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(like._indices(), values, like.sizes())._coalesced_(true);
}

std::string refusal_of_sparse(std::string_view instead) {
  return fmt::format(
      "but its rule changes all elements at every step; use dense gradients for the parameter, or use {}",
      instead);
}

std::string refusal_of_decay(double weight_decay) {
  if (weight_decay == 0) return {};
  return fmt::format(
      "which weight_decay = {} would make dense; use weight_decay = 0 or dense gradients for "
      "this parameter",
      weight_decay);
}

}  // namespace torchspan::optim
