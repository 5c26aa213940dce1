#include "data_parallel/passes.h"

#include <exception>
#include <numeric>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "data_parallel/reducer_impl.h"
#include "engine/api/node_ptr.h"

namespace torchspan::data_parallel {
namespace {

/// What a mark reports, and the reducer and record that get it.
struct Marked {
  MarkOptions options;
  ForwardPtr record;
  Reached reached;
};

class MarkHook final : public engine::PassHook {
 public:
  explicit MarkHook(Marked marked) : PassHook(marked.options.passes), marked_(std::move(marked)) {}
  ~MarkHook() override {
    // A pipeline that fails discards the graphs of its micro-batches when the exception has been caught.
    const bool in_layer = marked_.record->part.kind != StepPart::Kind::kNone;
    if (marked_.reached.derivative || (std::uncaught_exceptions() <= exceptions_ && !in_layer)) return;
    if (const auto reducer = marked_.options.reducer.lock())
      reducer->mark_dropped(marked_.record, marked_.reached.mark);
  }
  MarkHook(const MarkHook&) = delete;
  MarkHook& operator=(const MarkHook&) = delete;
  void pass_arrives(engine::GradientSink& sink) override {
    const auto reducer = marked_.options.reducer.lock();
    if (reducer) reducer->mark_reached(sink, marked_.record, marked_.reached);
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

engine::NodePtrTo<ForwardMark> new_mark(const MarkOptions& options, const ForwardPtr& record) {
  record->passed.push_back(false);
  return engine::make_node<ForwardMark>(Marked{options, record, {.mark = record->passed.size() - 1}});
}

}  // namespace

std::vector<at::Tensor> mark_outputs(std::vector<at::Tensor> outputs, const ForwardPtr& record,
                                     const MarkOptions& options) {
  engine::NodePtrTo<ForwardMark> node;
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (!node || !options.together) node = new_mark(options, record);
    output = stand_in_of(output, node);
  }
  return outputs;
}

void Forwards::add(const ForwardPtr& record) {
  std::erase_if(records_, [](const auto& other) { return other.expired(); });
  records_.push_back(record);
}

bool Forwards::others_unfinished(const ForwardPtr& record) const {
  return std::any_of(records_.begin(), records_.end(), [&](const auto& other) {
    const ForwardPtr alive = other.lock();
    return alive && alive != record && !alive->all_passed();
  });
}

ForwardPtr Forwards::unreached() const {
  for (const auto& weak : records_) {
    if (ForwardPtr record = weak.lock(); record && record->is_awaited()) return record;
  }
  return nullptr;
}

void Forwards::note_dropped(const ForwardPtr& record) {
  if (record->is_awaited() && !dropped_) dropped_ = record;
}

ForwardPtr Forwards::take_dropped() { return std::exchange(dropped_, nullptr); }

ForwardPtr Forwards::forget() {
  for (const auto& weak : records_) {
    if (const ForwardPtr record = weak.lock()) record->settled = true;
  }
  return take_dropped();
}

ForwardPtr Forwards::skip() {
  for (const auto& weak : records_) {
    if (const ForwardPtr record = weak.lock()) record->skipped = true;
  }
  return forget();
}

bool LocalPass::begin(const std::shared_ptr<engine::PassEnd>& end) {
  begun_ = true;
  stray_ = false;
  if (end_ == end) return false;
  end_ = end;
  std::fill(arrived_.begin(), arrived_.end(), 0);
  return true;
}

bool LocalPass::add(const std::shared_ptr<engine::PassEnd>& end, std::size_t slot, bool expected_elsewhere) {
  if (is_idle()) {
    begun_ = stray_ = false;
    end_ = end;
    std::fill(arrived_.begin(), arrived_.end(), 0);
  }
  arrived_[slot] = 1;
  const bool becomes_stray = !expected_elsewhere && !begun_ && !stray_;
  stray_ = stray_ || becomes_stray;
  return becomes_stray;
}

std::vector<std::size_t> LocalPass::take(const std::shared_ptr<engine::PassEnd>& end) {
  std::vector<std::size_t> arrived;
  for (std::size_t slot = 0; end_ == end && slot < arrived_.size(); ++slot) {
    if (arrived_[slot] != 0) arrived.push_back(slot);
  }
  end_.reset();
  return arrived;
}

void LocalPass::forget(const engine::PassEnd* end) {
  if (end_.get() == end) end_.reset();
}

StaticGraph::StaticGraph(std::size_t slots) : expected_(slots), last_(slots) {}

void StaticGraph::begin_recording() { std::fill(expected_.begin(), expected_.end(), 0U); }

void StaticGraph::record(std::size_t slot) {
  ++expected_[slot];
  last_[slot] = ++time_;
}

std::vector<std::size_t> StaticGraph::end_recording() {
  known_ = true;
  std::vector<std::size_t> order(last_.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [this](std::size_t a, std::size_t b) { return last_[a] < last_[b]; });
  return order;
}

std::vector<std::size_t> StaticGraph::begin_pass() {
  remaining_ = expected_;
  std::vector<std::size_t> unused;
  for (std::size_t slot = 0; slot < expected_.size(); ++slot) {
    if (expected_[slot] == 0) unused.push_back(slot);
  }
  return unused;
}

StaticGraph::Arrival StaticGraph::arrive(std::size_t slot) {
  if (remaining_[slot] == 0) return Arrival::kTooMany;
  return --remaining_[slot] > 0 ? Arrival::kMoreFollow : Arrival::kLast;
}

void UndefinedGradients::pass_begins(const ParameterSlots& slots, const engine::GradientSink& sink) {
  if (!sink.writes_grad_field() || std::exchange(noted_, true)) return;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (!slots.tensor(slot).mutable_grad().defined()) undefined_.push_back(slot);
  }
}

std::vector<std::size_t> UndefinedGradients::take() {
  noted_ = false;
  return std::exchange(undefined_, {});
}

}  // namespace torchspan::data_parallel
