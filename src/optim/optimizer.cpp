#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/optimizer.h>

#include "core/api/throw_invalid.h"
#include "optim/parameters.h"
#include "optim/state_sources.h"
#include "state/api/gradient_norm.h"

namespace torchspan::optim {
namespace {

at::Tensor text_tensor(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<std::uint8_t>());
  return bytes;
}

std::string text_of(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kByte) return {};
  const at::Tensor bytes = tensor.contiguous();
  const auto* data = bytes.data_ptr<std::uint8_t>();
  return {data, data + bytes.numel()};
}

[[noreturn]] void refuse(const std::string& trouble) {
  throw_invalid("the optimizer state does not match: " + trouble);
}

const at::Tensor& entry(const StateDict& state, const std::string& name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr) refuse(fmt::format("it has no '{}'", name));
  return *found;
}

/// The entries of parameters, by "group.<label>.parameter.<name>", then by the name of the entry.
std::map<std::string, ParameterState> by_parameter(const StateDict& state) {
  std::map<std::string, ParameterState> result;
  for (const auto& item : state) {
    const std::size_t dot = item.key().rfind('.');
    const std::string path = item.key().substr(0, dot);
    if (dot == std::string::npos || path.find(".parameter.") == std::string::npos) continue;
    result[path].emplace(item.key().substr(dot + 1), item.value());
  }
  return result;
}

/// A parameter without state is saved with zero steps, which distinguishes it from a missing parameter.
ParameterState unless_empty(ParameterState state) {
  const auto step = state.find("step");
  const bool empty = state.size() == 1 && step != state.end() && step->second.numel() == 1 &&
                     step->second.item<std::int64_t>() == 0;
  return empty ? ParameterState() : std::move(state);
}

void leave_out_never_trained(ParamGroup& group) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    if (never_trained(group.parameters[i])) continue;
    if (i < group.names.size()) group.names[kept] = group.names[i];
    group.parameters[kept++] = group.parameters[i];
  }
  group.parameters.resize(kept);
  if (!group.names.empty()) group.names.resize(kept);
}

}  // namespace

ParamGroup::ParamGroup(std::vector<at::Tensor> parameters, OptimizerSpec spec, std::vector<std::string> names)
    : parameters(std::move(parameters)), spec(std::move(spec)), names(std::move(names)) {}

ParamGroup::ParamGroup(const torch::nn::Module& module, OptimizerSpec spec) : spec(std::move(spec)) {
  for (auto& [name, parameter] : named_parameters_of(module)) {
    names.push_back(name);
    parameters.push_back(parameter);
  }
}

Optimizer::Optimizer(std::vector<at::Tensor> parameters, OptimizerSpec spec)
    : Optimizer(std::vector<ParamGroup>{ParamGroup(std::move(parameters), std::move(spec))}) {}

Optimizer::Optimizer(const torch::nn::Module& module, OptimizerSpec spec)
    : Optimizer(std::vector<ParamGroup>{ParamGroup(module, std::move(spec))}) {}

Optimizer::Optimizer(std::vector<ParamGroup> groups, const OptimizerTable* table) {
  if (groups.empty()) throw_invalid("an Optimizer needs at least one group of parameters");
  for (ParamGroup& group : groups) add(std::move(group), table);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto& parameters = rule(g).parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto [first, is_new] = places_.emplace(parameters[i].unsafeGetTensorImpl(), std::make_pair(g, i));
      if (is_new) continue;
      throw_invalid("{} of group {} is in group {} too, and would be updated twice in a step; list it once",
                    rule(g).describe(i), groups_[g].label, groups_[first->second.first].label);
    }
  }
}

void Optimizer::add(ParamGroup group, const OptimizerTable* table) {
  Part part;
  part.label = group.label.empty() ? std::to_string(groups_.size()) : group.label;
  const bool named = !group.names.empty();
  if (named && group.names.size() != group.parameters.size()) {
    throw_invalid("group {} has {} parameters and {} names; pass one for each parameter", part.label,
                  group.parameters.size(), group.names.size());
  }
  leave_out_never_trained(group);
  if (named) check_parameters(fmt::format("group {}", part.label), group.parameters, group.names);
  const std::size_t count = group.parameters.size();
  part.rule = table != nullptr ? table->build(group.spec, std::move(group.parameters))
                               : group.spec.build(std::move(group.parameters));
  if (group.hogwild) part.rule->set_hogwild(true);
  part.names = std::move(group.names);
  for (std::size_t i = part.names.size(); i < count; ++i) part.names.push_back(std::to_string(i));
  std::vector<std::string> sorted = part.names;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    throw_invalid("group {} has two parameters '{}'", part.label, *twice);
  }
  if (named) part.rule->set_parameter_names(part.names);
  groups_.push_back(std::move(part));
}

void Optimizer::step() {
  step([](const at::Tensor& parameter) { return parameter.grad(); });
}

void Optimizer::step(const GradientOf& gradient_of) {
  std::vector<std::vector<at::Tensor>> gradients(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const at::Tensor& parameter : rule(g).parameters()) gradients[g].push_back(gradient_of(parameter));
    if (groups_.size() > 1) rule(g).check(gradients[g]);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g].rule->step(gradients[g]);
}

std::string Optimizer::describe(const at::Tensor& parameter) const {
  const auto& [group, index] = places_.at(parameter.unsafeGetTensorImpl());
  return rule(group).describe(index);
}

void Optimizer::step_one(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto place = places_.find(parameter.unsafeGetTensorImpl());
  if (place == places_.end()) {
    throw_invalid("a tensor of shape {} is not a parameter of this optimizer", c10::str(parameter.sizes()));
  }
  const auto& [group, index] = place->second;
  groups_[group].rule->step_one(index, gradient);
}

void Optimizer::zero_grad(bool set_to_none) {
  for (at::Tensor& parameter : parameters()) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.detach_();
      gradient.zero_();
    }
  }
}

double Optimizer::clip_grad_norm(double max_norm, double norm_type) {
  refuse_steps_in_backward(parameters(), "clip_grad_norm()");
  return optim::clip_grad_norm(parameters(), max_norm, norm_type);
}

double Optimizer::lr(std::size_t group) const { return rule(group).lr(); }

void Optimizer::set_lr(double lr) {
  for (const Part& part : groups_) part.rule->set_lr(lr);
}

void Optimizer::set_lr(std::size_t group, double lr) { groups_.at(group).rule->set_lr(lr); }

std::vector<double> Optimizer::lrs() const {
  std::vector<double> rates;
  for (const Part& part : groups_) rates.push_back(part.rule->lr());
  return rates;
}

void Optimizer::set_lrs(const std::vector<double>& rates) {
  if (rates.size() != groups_.size()) {
    throw_invalid("there are {} groups and {} learning rates; pass one for each group", groups_.size(),
                  rates.size());
  }
  for (std::size_t g = 0; g < rates.size(); ++g) {
    if (!std::isnan(rates[g])) set_lr(g, rates[g]);
  }
}

std::vector<at::Tensor> Optimizer::parameters() const {
  std::vector<at::Tensor> all;
  for (const Part& part : groups_) {
    const auto& some = static_cast<const FunctionalOptimizer&>(*part.rule).parameters();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::vector<std::string> Optimizer::state_names() const {
  std::vector<std::string> all;
  for (const Part& part : groups_) {
    for (const std::string& name : part.names) all.push_back(state_name(part.label, name));
  }
  return all;
}

std::string Optimizer::state_name(const std::string& label, const std::string& parameter) {
  return fmt::format("group.{}.parameter.{}", label, parameter);
}

state::SourcePtr Optimizer::state_source() { return source_of(*this); }

StateDict Optimizer::state_dict() const {
  StateDict copy;
  for (const auto& entry : state_view()) copy.insert(entry.key(), entry.value().clone());
  return copy;
}

StateDict Optimizer::state_view() const {
  StateDict result;
  for (const Part& part : groups_) {
    const std::string group = fmt::format("group.{}.", part.label);
    result.insert(group + "kind", text_tensor(part.rule->name()));
    result.insert(group + "lr", at::scalar_tensor(part.rule->lr(), at::kDouble));
    for (std::size_t i = 0; i < part.names.size(); ++i) {
      const std::string path = state_name(part.label, part.names[i]) + ".";
      ParameterState state = part.rule->state(i);
      if (state.empty()) state.emplace("step", at::scalar_tensor(0, at::kLong));
      for (const auto& [name, value] : state) result.insert(path + name, value.detach());
    }
  }
  return result;
}

void Optimizer::load_state_dict(const StateDict& state) {
  std::map<std::string, ParameterState> given = by_parameter(state);
  std::vector<double> rates;
  for (const Part& part : groups_) {
    const std::string group = fmt::format("group.{}.", part.label);
    const std::string kind = text_of(entry(state, group + "kind"));
    if (kind != part.rule->name()) {
      refuse(fmt::format("group {} was trained by '{}', but this optimizer has '{}'", part.label, kind,
                         part.rule->name()));
    }
    rates.push_back(entry(state, group + "lr").item<double>());
    for (std::size_t i = 0; i < part.names.size(); ++i) {
      if (given.contains(state_name(part.label, part.names[i]))) continue;
      refuse(fmt::format("it has no entry for {} of group {}", part.rule->describe(i), part.label));
    }
  }
  std::vector<std::function<void()>> undo;
  try {
    for (const Part& part : groups_) {
      for (std::size_t i = 0; i < part.names.size(); ++i) {
        auto mine = given.extract(state_name(part.label, part.names[i]));
        undo.emplace_back([&rule = *part.rule, i, old = part.rule->state(i)] { rule.load_state(i, old); });
        part.rule->load_state(i, unless_empty(std::move(mine.mapped())));
      }
    }
    if (!given.empty())
      refuse(fmt::format("it has '{}', which this optimizer does not", given.begin()->first));
    undo.emplace_back([this, old = lrs()] { set_lrs(old); });
    set_lrs(rates);
  } catch (...) {
    for (const auto& put_back : undo) put_back();
    throw;
  }
}

namespace {

void check_type(double norm_type) {
  if (norm_type > 0) return;
  throw_invalid("norm_type = {}, but it must be a number above 0, or infinity", norm_type);
}

}  // namespace

double gradient_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  check_type(norm_type);
  return state::norm_of(gradients, norm_type);
}

double clip_factor(double norm, double max_norm) {
  if (!(max_norm > 0)) {
    throw_invalid("max_norm = {}, but it must be a number above 0", max_norm);
  }
  return state::clip_factor(norm, max_norm);
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  check_type(norm_type);
  clip_factor(0, max_norm);  // checks the option on all ranks, before any of them waits
  return state::clip(state::gradients_at_places(parameters), max_norm, norm_type);
}

}  // namespace torchspan::optim

namespace torchspan {

void Wire<optim::StateDict>::encode(wire::Encoder& encoder, const optim::StateDict& value) {
  optim::StateDict::Entries entries;
  for (const auto& entry : value) entries.emplace_back(entry.key(), entry.value());
  wire::encode<optim::StateDict::Entries>(encoder, entries);
}

optim::StateDict Wire<optim::StateDict>::decode(wire::Decoder& decoder) {
  return optim::StateDict(wire::decode<optim::StateDict::Entries>(decoder));
}

}  // namespace torchspan
