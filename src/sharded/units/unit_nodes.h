#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"

namespace torchspan::sharded {

class Unit;
class ShardedModel;

/// One forward of a unit that a backward pass may follow. Nodes of the graph own it.
struct ForwardRecord {
  std::shared_ptr<Unit> unit;
  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<Unit> before;  ///< ran before it in the forward of the whole module; null: unknown
  bool synchronize = true;
  std::shared_ptr<engine::PassEnd> entered;  ///< of the last pass that came through its outputs
};
using RecordPtr = std::shared_ptr<ForwardRecord>;

/// Receives the whole gradients of a unit's trained parameters from one forward, all at once.
struct UnitGradients final : torch::autograd::Node {
  explicit UnitGradients(RecordPtr record) : record(std::move(record)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "ShardedUnitGradients"; }

  const RecordPtr record;
};

/// A node whose inputs are the unit's trained parameters, which are gathered; null if there are none.
engine::NodePtr make_gradients_node(const RecordPtr& record);

/// Returns stand-ins for the tensors. A pass that goes through one of them first calls the model.
std::vector<at::Tensor> mark_unit_outputs(std::vector<at::Tensor> outputs, const RecordPtr& record,
                                          const engine::NodePtr& gradients);

}  // namespace torchspan::sharded
