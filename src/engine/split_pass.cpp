#include "engine/api/split_pass.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/api/throw_invalid.h"
#include "engine/api/compat.h"
#include "engine/api/node_ptr.h"
#include "engine/execute.h"
#include "engine/streams.h"

namespace torchspan::engine {
namespace {

/// When a pass in two parts runs a node.
enum class NodePart : std::uint8_t {
  kInputs,    ///< in the first part: all its edges lead to the input nodes
  kBoth,      ///< in each part, for the edges of that part
  kHeldBack,  ///< once in the first part; its gradients for weights wait for the second
  kWeights,   ///< in the second part: no edge leads to an input node
};

using torch::autograd::Node;

using torch::autograd::edge_list;

using torch::autograd::Edge;

using torch::autograd::AccumulateGrad;

/// Whether the node may run twice, each time for some of its edges. A custom function may have side effects, a
/// post hook must see all gradients at once, and fused recurrent cells compute all of them together.
bool can_run_twice(const Node& node) {
  if (!compat::is_generated(node) || !node.post_hooks().empty()) return false;
  const std::string name = node.name();
  for (const std::string_view fused : {"Rnn", "Lstm", "Gru"}) {
    if (name.find(fused) != std::string::npos) return false;
  }
  return true;
}

/// The nodes behind the roots of a pass, in the order in which a pass in one part runs them, and the part of
/// each. Keeps no node alive.
class SplitGraph {
 public:
  static constexpr std::uint32_t kNowhere = 0xFFFFFFFF;
  struct Target {
    std::uint32_t index = kNowhere;  ///< of a node
    std::uint32_t input = 0;
  };
  struct Entry {
    torch::autograd::Node* node = nullptr;
    torch::autograd::AccumulateGrad* leaf = nullptr;
    NodePart part = NodePart::kWeights;
    std::vector<Target> targets = {};  ///< by edge
  };

  SplitGraph(const edge_list& roots, const std::vector<NodePtr>& inputs) {
    discover(roots);
    sort(roots);
    divide(inputs);
  }

  const std::vector<Entry>& entries() const { return entries_; }
  std::uint32_t index_of(const torch::autograd::Node& node) const { return index_.at(&node); }
  /// Whether the gradient of this edge belongs to the second part.
  bool is_for_weights(const Target& target) const {
    return target.index != kNowhere && entries_[target.index].part == NodePart::kWeights;
  }

 private:
  void discover(const edge_list& roots) {
    const auto visit = [this](Node* node) {
      const auto [found, is_new] = index_.emplace(node, static_cast<std::uint32_t>(entries_.size()));
      if (is_new) {
        entries_.push_back({node});
        if (node->num_outputs() == 0) entries_.back().leaf = dynamic_cast<AccumulateGrad*>(node);
      }
      return found->second;
    };
    for (const Edge& root : roots) visit(root.function.get());
    for (std::size_t index = 0; index < entries_.size(); ++index) {
      const edge_list& edges = std::as_const(*entries_[index].node).next_edges();
      std::vector<Target> targets;
      targets.reserve(edges.size());
      for (const Edge& edge : edges) {
        targets.push_back(edge.is_valid() ? Target{visit(edge.function.get()), edge.input_nr} : Target{});
      }
      entries_[index].targets = std::move(targets);
    }
  }

  /// Puts the entries into the order in which GraphPass and LibTorch's engine run them.
  void sort(const edge_list& roots) {
    std::vector<std::uint32_t> dependencies(entries_.size(), 0);
    for (const Entry& entry : entries_) {
      for (const Target& target : entry.targets) {
        if (target.index != kNowhere) ++dependencies[target.index];
      }
    }
    // Leaves first, then the highest sequence number, then the order of discovery.
    using Ready = std::tuple<std::uint64_t, std::int64_t>;
    std::priority_queue<Ready> ready;
    const auto make_ready = [&](std::uint32_t index) {
      const Entry& entry = entries_[index];
      const bool leaf = entry.leaf != nullptr;
      ready.emplace(leaf ? std::numeric_limits<std::uint64_t>::max() : entry.node->sequence_nr(),
                    -static_cast<std::int64_t>(index));
    };
    for (const Edge& root : roots) {
      const std::uint32_t index = index_.at(root.function.get());
      if (dependencies[index] == 0) make_ready(index);
      dependencies[index] =
          dependencies[index] == 0 ? kNowhere : dependencies[index];  // a root may be listed twice
    }
    std::vector<std::uint32_t> place(entries_.size(), kNowhere);
    std::vector<Entry> sorted;
    sorted.reserve(entries_.size());
    while (!ready.empty()) {
      const auto index = static_cast<std::uint32_t>(-std::get<1>(ready.top()));
      ready.pop();
      place[index] = static_cast<std::uint32_t>(sorted.size());
      for (const Target& target : entries_[index].targets) {
        if (target.index != kNowhere && --dependencies[target.index] == 0) make_ready(target.index);
      }
      sorted.push_back(std::move(entries_[index]));
    }
    entries_ = std::move(sorted);
    for (Entry& entry : entries_) {
      for (Target& target : entry.targets) {
        if (target.index != kNowhere) target.index = place[target.index];
      }
    }
    for (auto& [node, index] : index_) index = place[index];
  }

  void divide(const std::vector<NodePtr>& inputs) {
    for (const NodePtr& input : inputs) {
      const auto found = index_.find(input.get());
      if (found != index_.end()) entries_[found->second].part = NodePart::kInputs;
    }
    // Gradients of vectors and scalars (biases, scales) take little time: a second run of the node would cost more
    // than it delays. A node comes before those that its edges lead to.
    std::vector<bool> reaches_matrix(entries_.size(), false);
    for (std::size_t next = entries_.size(); next-- > 0;) {
      Entry& entry = entries_[next];
      bool any_input = entry.part == NodePart::kInputs, any_weight = false;
      bool any_matrix = entry.leaf != nullptr && entry.leaf->variable.dim() >= 2;
      for (const Target& target : entry.targets) {
        if (target.index == kNowhere) continue;
        const bool weight = is_for_weights(target);
        any_input = any_input || !weight;
        any_weight = any_weight || weight;
        any_matrix = any_matrix || (weight && reaches_matrix[target.index]);
      }
      reaches_matrix[next] = any_matrix;
      if (!any_input) continue;
      entry.part = !any_weight                                ? NodePart::kInputs
                   : any_matrix && can_run_twice(*entry.node) ? NodePart::kBoth
                                                              : NodePart::kHeldBack;
    }
  }

  std::vector<Entry> entries_;
  std::unordered_map<const torch::autograd::Node*, std::uint32_t> index_;
};

}  // namespace

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

std::uint32_t version_of(const at::Tensor& gradient) {
  return gradient.defined() && !gradient.is_inference() ? static_cast<std::uint32_t>(gradient._version()) : 0;
}

}  // namespace

class SplitPass::Impl {
 public:
  Impl(GradientSink& sink, std::vector<NodePtr> inputs)
      : sink_(sink), streams_(std::nullopt, {}), input_nodes_(std::move(inputs)) {
    if (streams_.any()) sink.end()->run_on(streams_.caller());
  }
  ~Impl() { end(std::make_exception_ptr(Error(ErrorKind::kCancelled, kDropped))); }

  void add_root(Edge root, at::Tensor gradient);
  void run_inputs();
  void run_weights();

 private:
  enum class State : std::uint8_t { kNew, kBetween, kEnded };
  static constexpr const char* kDropped =
      "the backward pass was destroyed before the part that computes the gradients of weights";
  /// What the second part needs from the first, by node.
  struct Kept {
    variable_list gradients;              ///< NodePart::kBoth: incoming; kHeldBack: outgoing, by edge
    std::vector<std::uint32_t> versions;  ///< of incoming ones
  };

  using Entry = SplitGraph::Entry;
  void expect(State state, const char* call) const;
  template <class Body>
  void run_part(const Body& run_entry);
  void run_first(std::uint32_t index);
  void run_second(std::uint32_t index);
  std::vector<bool> edges_of_part(const Entry& entry, bool weights) const;
  variable_list take_inputs(std::uint32_t index);
  void add(const SplitGraph::Target& target, at::Tensor gradient);
  /// Gives gradients to the nodes of the running part, and keeps the others. `outputs` are by edge.
  void distribute(std::uint32_t index, variable_list outputs, bool first);
  void keep_incoming(std::uint32_t index, const variable_list& gradients);
  void check_unchanged(std::uint32_t index) const;
  void keep_nodes();
  [[noreturn]] void fail(Node* node);
  void end(std::exception_ptr error);

  GradientSink& sink_;
  PassStreams streams_;
  State state_ = State::kNew;
  std::vector<NodePtr> input_nodes_;  ///< until the end of the first part
  edge_list roots_;                   ///< the same
  variable_list root_gradients_;      ///< until the beginning of the first part
  std::optional<SplitGraph> graph_;
  std::vector<variable_list> inputs_;  ///< by node: gradients that have arrived
  std::vector<Kept> kept_;             ///< by node
  std::vector<NodePtr> kept_nodes_;    ///< those that the second part runs
};

void SplitPass::Impl::expect(State state, const char* call) const {
  if (state_ == state) return;
  throw_invalid(
      "{} of a backward pass in two parts {}: call add_root(), then run_inputs() and run_weights(), once "
      "each",
      call, state_ == State::kEnded ? "that has ended" : "in the wrong order");
}

void SplitPass::Impl::add_root(Edge root, at::Tensor gradient) {
  expect(State::kNew, "add_root()");
  if (!root.is_valid()) throw_invalid("a root of a pass needs a node, but this edge has none");
  variable_list gradients{std::move(gradient)};
  const c10::AutoGradMode grad_mode(false);
  fit_gradients({root}, gradients);
  roots_.push_back(std::move(root));
  root_gradients_.push_back(std::move(gradients[0]));
}

template <class Body>
void SplitPass::Impl::run_part(const Body& run_entry) {
  const device::StreamsScope streams(streams_.caller());
  const c10::AutoGradMode grad_mode(false);
  const auto count = static_cast<std::uint32_t>(graph_->entries().size());
  for (std::uint32_t index = 0; index < count; ++index) {
    try {
      run_entry(index);
    } catch (...) {
      fail(graph_->entries()[index].node);
    }
  }
  try {
    streams_.join();
  } catch (...) {
    end(std::current_exception());
    throw;
  }
}

void SplitPass::Impl::run_inputs() {
  expect(State::kNew, "run_inputs()");
  const auto* filter = torch::autograd::get_current_graph_task_exec_info();
  if (filter != nullptr && !filter->empty()) {
    throw Error(
        ErrorKind::kUnsupported,
        "a backward pass in two parts was started inside a node of LibTorch's engine that computes only "
        "some gradients, which would ignore edges of this pass; call backward without inputs");
  }
  graph_.emplace(roots_, input_nodes_);
  inputs_.resize(graph_->entries().size());
  kept_.resize(graph_->entries().size());
  {
    const c10::AutoGradMode grad_mode(false);
    for (std::size_t root = 0; root < roots_.size(); ++root) {
      streams_.hand_over(root_gradients_[root], *roots_[root].function);
      add({graph_->index_of(*roots_[root].function), roots_[root].input_nr},
          std::move(root_gradients_[root]));
    }
    root_gradients_.clear();
  }
  run_part([this](std::uint32_t index) { run_first(index); });
  keep_nodes();
  state_ = State::kBetween;
}

void SplitPass::Impl::run_weights() {
  expect(State::kBetween, "run_weights()");
  run_part([this](std::uint32_t index) { run_second(index); });
  end(nullptr);
}

std::vector<bool> SplitPass::Impl::edges_of_part(const Entry& entry, bool weights) const {
  std::vector<bool> wanted;
  for (const auto& target : entry.targets) {
    wanted.push_back(target.index != SplitGraph::kNowhere && graph_->is_for_weights(target) == weights);
  }
  return wanted;
}

variable_list SplitPass::Impl::take_inputs(std::uint32_t index) {
  variable_list gradients = std::exchange(inputs_[index], {});
  const std::size_t wanted = graph_->entries()[index].node->num_inputs();
  if (gradients.size() < wanted) gradients.resize(wanted);
  return gradients;
}

void SplitPass::Impl::run_first(std::uint32_t index) {
  const Entry& entry = graph_->entries()[index];
  if (entry.part == NodePart::kWeights) return;
  variable_list gradients = take_inputs(index);
  if (entry.targets.empty()) streams_.ends_at(*entry.node);
  const NodeStreamScope scope(*entry.node, streams_);
  if (entry.leaf != nullptr) return run_leaf(*entry.leaf, std::move(gradients), sink_);
  if (entry.part != NodePart::kBoth)
    return distribute(index, run_node(*entry.node, std::move(gradients), sink_, false), true);
  gradients = run_pre_hooks(*entry.node, std::move(gradients), sink_);
  keep_incoming(index, gradients);
  distribute(index, run_edges(*entry.node, std::move(gradients), edges_of_part(entry, false), true), true);
}

void SplitPass::Impl::run_second(std::uint32_t index) {
  const Entry& entry = graph_->entries()[index];
  if (entry.part == NodePart::kInputs) return;
  if (entry.part == NodePart::kBoth) check_unchanged(index);
  variable_list gradients = std::exchange(kept_[index], {}).gradients;
  if (entry.part == NodePart::kHeldBack) {
    for (std::size_t edge = 0; edge < gradients.size(); ++edge) {
      if (graph_->is_for_weights(entry.targets[edge])) add(entry.targets[edge], std::move(gradients[edge]));
    }
    return;
  }
  if (entry.part == NodePart::kWeights) gradients = take_inputs(index);
  if (entry.targets.empty()) streams_.ends_at(*entry.node);
  const NodeStreamScope scope(*entry.node, streams_);
  if (entry.leaf != nullptr) return run_leaf(*entry.leaf, std::move(gradients), sink_);
  if (entry.part == NodePart::kWeights)
    return distribute(index, run_node(*entry.node, std::move(gradients), sink_, false), false);
  distribute(index, run_edges(*entry.node, std::move(gradients), edges_of_part(entry, true), false), false);
}

/// The gradient has been delivered: the stream on which the node uses it waits for it.
void SplitPass::Impl::add(const SplitGraph::Target& target, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const Node& node = *graph_->entries()[target.index].node;
  variable_list& inputs = inputs_[target.index];
  if (inputs.size() <= target.input)
    inputs.resize(std::max<std::size_t>(node.num_inputs(), target.input + 1));
  device::StreamsScope scope;
  if (streams_.any() && device::has_streams(gradient.device()))
    scope.enter(streams_.of(node, gradient.device()));
  at::Tensor& held = inputs[target.input];
  held = held.defined() ? sum_of(std::move(held), std::move(gradient)) : std::move(gradient);
}

void SplitPass::Impl::distribute(std::uint32_t index, variable_list outputs, bool first) {
  const Entry& entry = graph_->entries()[index];
  if (outputs.size() != entry.targets.size()) throw_invalid("the node's edges were changed during its pass");
  for (std::size_t edge = 0; edge < outputs.size(); ++edge) {
    const SplitGraph::Target& target = entry.targets[edge];
    if (target.index == SplitGraph::kNowhere || !outputs[edge].defined()) continue;
    streams_.hand_over(outputs[edge], *graph_->entries()[target.index].node);
    if (!first || !graph_->is_for_weights(target)) {
      add(target, std::move(outputs[edge]));
    } else {
      kept_[index].gradients.resize(outputs.size());
      kept_[index].gradients[edge] = std::move(outputs[edge]);
    }
  }
}

void SplitPass::Impl::keep_incoming(std::uint32_t index, const variable_list& gradients) {
  Kept& kept = kept_[index];
  kept.gradients = gradients;
  for (const at::Tensor& gradient : gradients) kept.versions.push_back(version_of(gradient));
}

void SplitPass::Impl::check_unchanged(std::uint32_t index) const {
  const Kept& kept = kept_[index];
  for (std::size_t input = 0; input < kept.versions.size(); ++input) {
    if (version_of(kept.gradients[input]) == kept.versions[input]) continue;
    throw_invalid(
        "its gradient {} was changed in place between the two parts of the pass, by a hook or a custom "
        "function that got the same tensor: change a copy there",
        input);
  }
}

/// The nodes that the second part needs; the end of the roots frees the others.
void SplitPass::Impl::keep_nodes() {
  for (const Entry& entry : graph_->entries()) {
    if (entry.part != NodePart::kInputs) kept_nodes_.push_back(owner_of(*entry.node));
  }
  roots_.clear();
  input_nodes_.clear();
}

void SplitPass::Impl::fail(Node* node) {
  const std::exception_ptr cause = std::current_exception();
  const std::string name = node->name();
  if (torch::autograd::AnomalyMode::is_enabled()) node->metadata()->print_stack(name);
  streams_.ends_at(*node);
  try {
    streams_.join();
  } catch (const std::exception&) {  // the device itself has failed: the node's error says more
  }
  const std::exception_ptr error = std::make_exception_ptr(name_failure(name, cause));
  end(error);
  std::rethrow_exception(error);
}

void SplitPass::Impl::end(std::exception_ptr error) {
  if (std::exchange(state_, State::kEnded) == State::kEnded) return;
  graph_.reset();
  inputs_.clear();
  kept_.clear();
  roots_.clear();
  root_gradients_.clear();
  kept_nodes_.clear();
  input_nodes_.clear();
  sink_.end()->end(std::move(error));
}

SplitPass::SplitPass(GradientSink& sink, std::vector<NodePtr> inputs)
    : impl_(std::make_unique<Impl>(sink, std::move(inputs))) {}
SplitPass::~SplitPass() = default;
void SplitPass::add_root(Edge root, at::Tensor gradient) {
  impl_->add_root(std::move(root), std::move(gradient));
}
void SplitPass::run_inputs() { impl_->run_inputs(); }
void SplitPass::run_weights() { impl_->run_weights(); }

}  // namespace torchspan::engine
