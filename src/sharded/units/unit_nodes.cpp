#include "sharded/units/unit_nodes.h"

#include <exception>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "sharded/units/sharded_model.h"

namespace torchspan::sharded {
namespace {

/// Calls the model; a failure reaches the other ranks with its reason.
template <class Call>
void call_model(ShardedModel& model, const Call& call) {
  try {
    call(model);
  } catch (const Error& error) {
    const Error named = model.with_unit_names(error);
    model.fail("its backward pass failed: " + std::string(named.what()));
    throw named;
  } catch (...) {
    model.fail("its backward pass failed: " + describe(std::current_exception()).text);
    throw;
  }
}

struct UnitOutputs final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradients.resize(num_outputs());
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedUnitOutputs"; }
};

class UnitOutputsHook final : public engine::PassHook {
 public:
  UnitOutputsHook(RecordPtr record, GradientNodes gradients)
      : PassHook(record->model->passes()), record_(std::move(record)), gradients_(std::move(gradients)) {}
  ~UnitOutputsHook() override {
    // A pipeline that fails discards the graphs of its micro-batches when the exception has been caught.
    const bool in_layer = record_->part.kind != StepPart::Kind::kNone;
    if (in_layer || std::uncaught_exceptions() > exceptions_) record_->model->outputs_dropped(*record_);
  }
  UnitOutputsHook(const UnitOutputsHook&) = delete;
  UnitOutputsHook& operator=(const UnitOutputsHook&) = delete;
  void pass_arrives(engine::GradientSink& sink) override {
    std::optional<Error> refusal;
    call_model(*record_->model, [&](ShardedModel& model) {
      refusal = model.begin_pass(sink, *record_);
      if (!refusal) model.enter_backward(sink, record_, gradients_);
    });
    if (refusal) throw Error(*refusal);
  }

 private:
  const RecordPtr record_;
  const GradientNodes gradients_;                      // the graph owns them anyway
  const int exceptions_ = std::uncaught_exceptions();  // that propagated in the forward
};

/// Whether the program wants a gradient. tensor.requires_grad() is true for any tensor with a gradient edge.
bool is_trained_now(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->requires_grad_;
}

}  // namespace

torch::autograd::variable_list UnitGradients::apply(torch::autograd::variable_list&&) {
  call_model(*record->model, [&](ShardedModel& model) { model.unit_ready(*this); });
  return {};
}

/// The largest sequence number, as AccumulateGrad: runs before other nodes that are ready.
ParameterGradient::ParameterGradient(std::size_t trained, engine::NodePtrTo<UnitGradients> all)
    : Node(std::numeric_limits<std::uint64_t>::max()), trained(trained), all(std::move(all)) {}

torch::autograd::variable_list ParameterGradient::apply(torch::autograd::variable_list&& gradients) {
  call_model(*all->record->model,
             [&](ShardedModel& model) { model.gradient_ready(*all, trained, std::move(gradients[0])); });
  return {at::Tensor()};
}

GradientNodes make_gradient_nodes(const RecordPtr& record) {
  const std::vector<at::Tensor> trained = record->unit->trained();
  const auto all = engine::make_node<UnitGradients>(record);
  GradientNodes nodes{all, {}};
  for (std::size_t i = 0; i < trained.size(); ++i) {
    if (!is_trained_now(trained[i])) {
      nodes.parameters.emplace_back();
      continue;
    }
    auto node = engine::make_node<ParameterGradient>(i, all);
    node->add_input_metadata(trained[i]);
    node->add_next_edge(torch::autograd::Edge(all, all->add_input_metadata(trained[i])));
    nodes.parameters.push_back(std::move(node));
  }
  return nodes;
}

std::vector<at::Tensor> mark_unit_outputs(std::vector<at::Tensor> outputs, const RecordPtr& record,
                                          const GradientNodes& gradients) {
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    auto node = engine::make_node<UnitOutputs>();
    node->add_pre_hook(std::make_unique<UnitOutputsHook>(record, gradients));
    node->add_next_edge(torch::autograd::impl::gradient_edge(output));
    // A pass that uses none of the parameters on this rank, but on others, reaches the node, too.
    if (gradients.all)
      node->add_next_edge(torch::autograd::Edge(gradients.all, gradients.all->add_input_metadata(output)));
    at::Tensor stand_in = output.detach();
    torch::autograd::create_gradient_edge(stand_in, node);
    output = std::move(stand_in);
  }
  return outputs;
}

}  // namespace torchspan::sharded
