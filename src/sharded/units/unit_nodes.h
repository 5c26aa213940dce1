#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "core/api/step_part.h"
#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"
#include "sharded/units/unit.h"

namespace torchspan::sharded {

/// One forward of a unit that a backward pass may follow. Nodes of the graph own it.
struct ForwardRecord {
  std::shared_ptr<Unit> unit;
  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<Unit> before;  ///< ran before it in the forward of the whole module; null: unknown
  bool synchronize = true;
  StepPart part;                             ///< in which the forward ran
  std::int64_t number = 0;                   ///< of the forward of the whole module
  bool has_no_pass = false;                  ///< the other ranks know that no pass follows
  bool contains_units = false;               ///< other units ran inside this forward
  std::shared_ptr<engine::PassEnd> entered;  ///< of the last pass that came through its outputs
};
using RecordPtr = std::shared_ptr<ForwardRecord>;

/// Runs when a pass has found the gradients of all trained parameters that one forward of a unit used.
struct UnitGradients final : torch::autograd::Node {
  explicit UnitGradients(RecordPtr record) : record(std::move(record)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override;
  std::string name() const override { return "ShardedUnitGradients"; }

  const RecordPtr record;
};

/// Receives the whole gradient of one parameter from one forward, as soon as it is known.
struct ParameterGradient final : torch::autograd::Node {
  ParameterGradient(std::size_t trained, engine::NodePtrTo<UnitGradients> all);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "ShardedParameterGradient"; }

  const std::size_t trained;  ///< index among the unit's trained parameters
  const engine::NodePtrTo<UnitGradients> all;
};

/// Nodes for the unit's trained parameters, which are gathered.
GradientNodes make_gradient_nodes(const RecordPtr& record);

/// Returns stand-ins for the tensors. A pass that goes through one of them first calls the model.
std::vector<at::Tensor> mark_unit_outputs(std::vector<at::Tensor> outputs, const RecordPtr& record,
                                          const GradientNodes& gradients);

}  // namespace torchspan::sharded
