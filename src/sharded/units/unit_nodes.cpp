#include "sharded/units/unit_nodes.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>

#include "sharded/units/sharded_model.h"
#include "sharded/units/unit.h"

namespace torchspan::sharded {
namespace {

struct UnitOutputs final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedUnitOutputs"; }
};

class UnitOutputsHook final : public engine::PassHook {
 public:
  UnitOutputsHook(RecordPtr record, engine::NodePtr gradients)
      : PassHook(record->model->passes()), record_(std::move(record)), gradients_(std::move(gradients)) {}
  void pass_arrives(engine::GradientSink& sink) override {
    record_->model->enter_backward(sink, record_, gradients_);
  }

 private:
  const RecordPtr record_;
  const engine::NodePtr gradients_;  // the graph owns it anyway
};

}  // namespace

torch::autograd::variable_list UnitGradients::apply(torch::autograd::variable_list&& gradients) {
  record->model->gradients_ready(*this, gradients);
  return {};
}

engine::NodePtr make_gradients_node(const RecordPtr& record) {
  const std::vector<at::Tensor> trained = record->unit->trained();
  if (trained.empty()) return {};
  auto node = engine::make_node<UnitGradients>(record);
  for (const at::Tensor& tensor : trained) node->add_input_metadata(tensor);
  return node;
}

std::vector<at::Tensor> mark_unit_outputs(std::vector<at::Tensor> outputs, const RecordPtr& record,
                                          const engine::NodePtr& gradients) {
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    auto node = engine::make_node<UnitOutputs>();
    node->add_pre_hook(std::make_unique<UnitOutputsHook>(record, gradients));
    node->add_next_edge(torch::autograd::impl::gradient_edge(output));
    at::Tensor stand_in = output.detach();
    torch::autograd::create_gradient_edge(stand_in, node);
    output = std::move(stand_in);
  }
  return outputs;
}

}  // namespace torchspan::sharded
