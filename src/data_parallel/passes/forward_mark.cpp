#include "data_parallel/passes/forward_mark.h"

#include <exception>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/api/node_ptr.h"

namespace torchspan::data_parallel {
namespace {

/// Passes gradients on, including undefined ones.
struct ForwardMark final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "DataParallelOutputs"; }
};

class MarkHook final : public engine::PassHook {
 public:
  MarkHook(const MarkOptions& options, std::shared_ptr<ForwardRecord> record, std::size_t mark)
      : PassHook(options.passes), listener_(options.listener), record_(std::move(record)), mark_(mark) {}
  ~MarkHook() override {
    if (std::uncaught_exceptions() == 0) return;
    if (const auto listener = listener_.lock()) listener->mark_dropped(record_);
  }
  MarkHook(const MarkHook&) = delete;
  MarkHook& operator=(const MarkHook&) = delete;
  void pass_arrives(engine::GradientSink& sink) override {
    if (const auto listener = listener_.lock()) listener->mark_reached(sink, record_, mark_);
  }

 private:
  const std::weak_ptr<MarkListener> listener_;
  const std::shared_ptr<ForwardRecord> record_;
  const std::size_t mark_;
};

engine::NodePtrTo<ForwardMark> new_mark(const MarkOptions& options,
                                        const std::shared_ptr<ForwardRecord>& record) {
  auto node = engine::make_node<ForwardMark>();
  node->add_pre_hook(std::make_unique<MarkHook>(options, record, record->passed.size()));
  record->passed.push_back(false);
  return node;
}

}  // namespace

std::vector<at::Tensor> mark_outputs(std::vector<at::Tensor> outputs,
                                     const std::shared_ptr<ForwardRecord>& record,
                                     const MarkOptions& options) {
  engine::NodePtrTo<ForwardMark> node;
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (!node || !options.together) node = new_mark(options, record);
    node->add_next_edge(torch::autograd::impl::gradient_edge(output));
    at::Tensor stand_in = output.detach();
    torch::autograd::create_gradient_edge(stand_in, node);
    output = std::move(stand_in);
  }
  return outputs;
}

}  // namespace torchspan::data_parallel
