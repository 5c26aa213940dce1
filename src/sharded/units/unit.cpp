#include "sharded/units/unit.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

std::string Unit::describe() const {
  return name_.empty() ? "the root unit" : fmt::format("unit '{}'", name_);
}

bool Unit::name_parameter(const at::Tensor& parameter, const std::string& name) {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.parameters->set_name(parameter, name); });
}

void Unit::set_place(std::string name, std::size_t number) {
  name_ = std::move(name);
  number_ = static_cast<std::int32_t>(number);
}

StepPartScope Unit::operations() const {
  StepPart part = StepPartScope::current();
  part.unit = number_;
  return StepPartScope(part);
}

std::shared_ptr<ShardedModel> Unit::model() const {
  if (auto model = model_.lock()) return model;
  throw Error(ErrorKind::kInvalid,
              fmt::format("the FullyShardedDataParallel of {} was destroyed, and its parameters "
                          "are divided; keep the wrapper as long as the module is used",
                          describe()));
}

bool Unit::is_gathered() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.parameters->is_gathered(); });
}

bool Unit::holds(const at::Tensor& tensor) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.parameters->holds(tensor); });
}

void Unit::prefetch() {
  const StepPartScope scope = operations();
  for (const Part& part : parts_) part.parameters->begin_gather();
}

void Unit::acquire() {
  if (!is_gathered()) ++gathers_;
  prefetch();
  for (const Part& part : parts_) part.parameters->end_gather();
  ++users_;
}

void Unit::acquire_whole() {
  if (!is_gathered()) ++gathers_;
  const StepPartScope scope = operations();
  for (const Part& part : parts_) part.parameters->begin_whole();
  ++users_;
}

void Unit::release_whole() {
  for (const Part& part : parts_) part.parameters->end_whole();
  release();
}

void Unit::release(bool keep) {
  if (users_ > 0) --users_;
  if (!keep) free_if_idle();
}

void Unit::free_if_idle() {
  if (users_ > 0) return;
  for (const Part& part : parts_) part.parameters->free();
}

void Unit::drop_prefetch() {
  if (users_ > 0) return;
  for (const Part& part : parts_) {
    if (part.parameters->is_gathering()) part.parameters->free();
  }
}

std::vector<at::Tensor> Unit::trained() const {
  std::vector<at::Tensor> tensors;
  for (const Part& part : parts_) {
    if (!part.gradients) continue;
    for (const FlatParameters::Entry& entry : part.parameters->entries()) tensors.push_back(entry.tensor);
  }
  return tensors;
}

void Unit::add_nodes(GradientNodes nodes) {
  nodes_.push_back(std::move(nodes));
  set_edges();
}

void Unit::remove_nodes(const torch::autograd::Node& all) {
  std::erase_if(nodes_, [&](const GradientNodes& one) { return one.all.get() == &all; });
  set_edges();
}

/// An operation of an older node's forward needs the parameters to have any node when its backward runs.
void Unit::set_edges() const {
  std::size_t index = 0;
  for (const at::Tensor& tensor : trained()) {
    torch::autograd::Edge edge;
    for (const GradientNodes& nodes : nodes_) {
      if (const engine::NodePtr& node = nodes.parameters[index]) edge = torch::autograd::Edge(node, 0);
    }
    ++index;
    torch::autograd::impl::set_gradient_edge(tensor, std::move(edge));
  }
}

void Unit::reset() {
  users_ = 0;
  nodes_.clear();
  set_edges();
  for (const Part& part : parts_) {
    if (part.gradients) part.gradients->drop();
    try {
      part.parameters->free();
    } catch (const Error&) {  // the group is broken
    }
  }
}

void check_frozen(Unit& unit) {
  for (const Unit::Part& part : unit.parts()) {
    if (part.gradients) continue;
    for (const FlatParameters::Entry& entry : part.parameters->entries()) {
      if (!entry.tensor.requires_grad()) continue;
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("parameter '{}' required no gradient when FullyShardedDataParallel divided it, and "
                      "requires one now, which would not be averaged; set requires_grad before the "
                      "module is wrapped, and freeze it afterwards",
                      entry.name));
    }
  }
}

}  // namespace torchspan::sharded
