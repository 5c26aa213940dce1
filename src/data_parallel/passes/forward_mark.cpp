#include "data_parallel/passes/forward_mark.h"

#include <exception>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/api/node_ptr.h"

namespace torchspan::data_parallel {
namespace {

/// What a mark reports, and to whom.
struct Marked {
  MarkOptions options;
  std::shared_ptr<ForwardRecord> record;
  Reached reached;
};

class MarkHook final : public engine::PassHook {
 public:
  explicit MarkHook(Marked marked) : PassHook(marked.options.passes), marked_(std::move(marked)) {}
  ~MarkHook() override {
    // A pipeline that fails discards the graphs of its micro-batches when the exception has been caught.
    const bool in_layer = marked_.record->part.kind != StepPart::Kind::kNone;
    if (marked_.reached.derivative || (std::uncaught_exceptions() <= exceptions_ && !in_layer)) return;
    if (const auto listener = marked_.options.listener.lock())
      listener->mark_dropped(marked_.record, marked_.reached.mark);
  }
  MarkHook(const MarkHook&) = delete;
  MarkHook& operator=(const MarkHook&) = delete;
  void pass_arrives(engine::GradientSink& sink) override {
    const auto listener = marked_.options.listener.lock();
    if (listener) listener->mark_reached(sink, marked_.record, marked_.reached);
  }

 private:
  const Marked marked_;
  const int exceptions_ = std::uncaught_exceptions();  ///< that propagated in the forward
};

/// Passes gradients on, including undefined ones. With create_graph, a pass through a derivative of the outputs by the
/// inputs need not go through the outputs. It goes through the gradients of the outputs, which get a mark, too.
struct ForwardMark final : torch::autograd::Node {
  explicit ForwardMark(Marked marked) : marked(std::move(marked)) {
    add_pre_hook(std::make_unique<MarkHook>(this->marked));
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "DataParallelOutputs"; }

  const Marked marked;
};

/// Returns a stand-in with the same memory, whose graph begins with the mark.
at::Tensor stand_in_of(const at::Tensor& tensor, const engine::NodePtrTo<ForwardMark>& node) {
  node->add_next_edge(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                             : torch::autograd::Edge());
  at::Tensor stand_in = tensor.detach();
  torch::autograd::create_gradient_edge(stand_in, node);
  return stand_in;
}

torch::autograd::variable_list ForwardMark::apply(torch::autograd::variable_list&& gradients) {
  if (!c10::GradMode::is_enabled()) return std::move(gradients);
  Marked derivative = marked;
  derivative.reached.derivative = true;
  const auto node = engine::make_node<ForwardMark>(std::move(derivative));
  for (at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient = stand_in_of(gradient, node);
  }
  return std::move(gradients);
}

engine::NodePtrTo<ForwardMark> new_mark(const MarkOptions& options,
                                        const std::shared_ptr<ForwardRecord>& record) {
  record->passed.push_back(false);
  return engine::make_node<ForwardMark>(Marked{options, record, {.mark = record->passed.size() - 1}});
}

}  // namespace

std::vector<at::Tensor> mark_outputs(std::vector<at::Tensor> outputs,
                                     const std::shared_ptr<ForwardRecord>& record,
                                     const MarkOptions& options) {
  engine::NodePtrTo<ForwardMark> node;
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (!node || !options.together) node = new_mark(options, record);
    output = stand_in_of(output, node);
  }
  return outputs;
}

}  // namespace torchspan::data_parallel
