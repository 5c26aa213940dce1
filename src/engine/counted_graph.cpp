#include "engine/counted_graph.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include "engine/execute.h"
#include "engine/sums.h"

namespace torchspan::engine {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

constexpr std::uint32_t kNowhere = 0xFFFFFFFF;

/// The sum of what came before and a newcomer.
at::Tensor sum_of(at::Tensor held, at::Tensor gradient) {
  // LibTorch adds what is there to a sparse newcomer: the order decides the last bits.
  if (held.is_sparse() && gradient.is_sparse()) std::swap(held, gradient);
  add_into(held, gradient);
  return held;
}

}  // namespace

CountedGraph::State::State(Node* node) : node(node), sequence(node->sequence_nr()) {
  if (node->num_outputs() == 0) leaf = dynamic_cast<AccumulateGrad*>(node);
}

void CountedGraph::add_local_root(Edge edge, at::Tensor gradient) {
  if (!edge.is_valid()) throw Error(ErrorKind::kInvalid, "a root of a pass needs a node: this edge has none");
  variable_list gradients{std::move(gradient)};
  const c10::AutoGradMode grad_mode(false);
  fit_gradients({edge}, gradients);
  local_roots_.push_back({std::move(edge), std::move(gradients[0])});
}

void CountedGraph::add_pending(std::shared_ptr<Node> root) { pending_.push_back(std::move(root)); }

std::uint32_t CountedGraph::index_of(Node* node) {
  auto [found, is_new] = index_.emplace(node, static_cast<std::uint32_t>(states_.size()));
  if (is_new) states_.emplace_back(node);
  return found->second;
}

void CountedGraph::count() {
  for (const LocalRoot& root : local_roots_) ++states_[index_of(root.edge.function.get())].dependencies;
  for (const auto& root : pending_) ++states_[index_of(root.get())].dependencies;
  for (std::size_t index = 0; index < states_.size(); ++index) {
    const auto& edges = states_[index].node->next_edges();
    states_[index].first_edge = static_cast<std::uint32_t>(edges_.size());
    states_[index].edge_count = static_cast<std::uint32_t>(edges.size());
    for (const Edge& edge : edges) {
      const std::uint32_t target = edge.is_valid() ? index_of(edge.function.get()) : kNowhere;
      if (target != kNowhere) ++states_[target].dependencies;
      edges_.push_back(target);
    }
  }
  progress_.nodes = states_.size();
}

void CountedGraph::start() {
  Guard guard(*this);
  for (LocalRoot& root : local_roots_) {
    const std::uint32_t target = index_.at(root.edge.function.get());
    add_input(guard, target, root.edge.input_nr, std::move(root.gradient));
    settle_one(target);
  }
}

void CountedGraph::open(Node& root, Delivery delivery) {
  const std::size_t expected = root.num_inputs();
  if (expected != 0 && delivery.gradients.size() != expected) {
    throw Error(ErrorKind::kInvalid, fmt::format("{} gradients were delivered, but it takes {}",
                                                 delivery.gradients.size(), expected));
  }
  const std::uint32_t target = index_.at(&root);
  State& state = states_[target];
  Guard guard(*this);
  state.reached = true;
  state.inputs.resize(std::max(state.inputs.size(), delivery.gradients.size()));
  for (std::uint32_t input = 0; input < delivery.gradients.size(); ++input) {
    add_input(guard, target, input, std::move(delivery.gradients[input]));
  }
  if (!delivery.reached.empty()) masks_[target] = std::move(delivery.reached);
  settle_one(target);
}

void CountedGraph::discard(Node& root) {
  Guard guard(*this);
  settle_one(index_.at(&root));
}

/// Sums are made without the lock: whoever comes meanwhile finds the place empty and puts his own there.
void CountedGraph::add_input(Guard& guard, std::uint32_t target, std::uint32_t input, at::Tensor gradient) {
  State& state = states_[target];
  state.reached = true;
  if (state.inputs.size() <= input) state.inputs.resize(std::max(state.node->num_inputs(), input + 1));
  if (!gradient.defined()) return;
  std::optional<HandOverScope> scope;
  if (cuda_) scope.emplace(gradient, *state.node, input);
  while (state.inputs[input].defined()) {
    at::Tensor held = std::move(state.inputs[input]);
    guard.unlock();
    gradient = sum_of(std::move(held), std::move(gradient));
    guard.lock();
  }
  state.inputs[input] = std::move(gradient);
}

void CountedGraph::settle_one(std::uint32_t target) {
  if (--states_[target].dependencies > 0) return;
  if (states_[target].reached) {
    make_ready(target);
  } else {
    skip(target);
  }
}

void CountedGraph::skip(std::uint32_t first) {
  std::vector<std::uint32_t> unreached{first};
  while (!unreached.empty()) {
    State& state = states_[unreached.back()];
    unreached.pop_back();
    state.settled = true;
    ++progress_.skipped;
    for (std::uint32_t i = 0; i < state.edge_count; ++i) {
      const std::uint32_t target = edges_[state.first_edge + i];
      if (target == kNowhere || --states_[target].dependencies > 0) continue;
      if (states_[target].reached) {
        make_ready(target);
      } else {
        unreached.push_back(target);
      }
    }
  }
}

void CountedGraph::make_ready(std::uint32_t index) {
  const State& state = states_[index];
  auto& ready = shared_ && state.leaf != nullptr ? ready_leaves_ : ready_;
  ready.push_back({state.sequence, index});
  std::push_heap(ready.begin(), ready.end());
}

bool CountedGraph::has_ready() {
  Guard guard(*this);
  return !ready_.empty() || (!ready_leaves_.empty() && !leaf_runs_);
}

std::optional<std::uint32_t> CountedGraph::take_ready() {
  Guard guard(*this);
  const bool take_leaf = !ready_leaves_.empty() && !leaf_runs_;
  auto& ready = take_leaf ? ready_leaves_ : ready_;
  if (ready.empty()) return std::nullopt;
  std::pop_heap(ready.begin(), ready.end());
  const std::uint32_t index = ready.back().index;
  ready.pop_back();
  leaf_runs_ = leaf_runs_ || take_leaf;
  return index;
}

void CountedGraph::execute(std::uint32_t index, GradientSink& sink, bool retain) {
  State& state = states_[index];
  variable_list inputs = std::move(state.inputs);
  if (inputs.size() < state.node->num_inputs()) inputs.resize(state.node->num_inputs());
  const NodeStreamScope scope(*state.node, cuda_);
  if (state.leaf) {
    run_leaf(*state.leaf, std::move(inputs), sink);
  } else {
    distribute(index, run_node(*state.node, std::move(inputs), sink, retain));
  }
  {
    Guard guard(*this);
    if (state.edge_count == 0 && scope.stream()) caller_streams_.leaf_used(*scope.stream());
    if (state.leaf) leaf_runs_ = false;
    state.settled = true;
  }
  ++progress_.executed;
}

void CountedGraph::distribute(std::uint32_t index, variable_list outputs) {
  const State& state = states_[index];
  if (outputs.size() != state.edge_count) {
    throw Error(ErrorKind::kInvalid, "the node's edges were changed while its pass was under way");
  }
  Guard guard(*this);
  const auto found = masks_.empty() ? masks_.end() : masks_.find(index);
  const std::vector<bool>* mask = found == masks_.end() ? nullptr : &found->second;
  for (std::uint32_t i = 0; i < state.edge_count; ++i) {
    const std::uint32_t target = edges_[state.first_edge + i];
    if (target == kNowhere) continue;
    const bool reached = mask == nullptr || (i < mask->size() && (*mask)[i]);
    if (reached) add_input(guard, target, state.node->next_edge(i).input_nr, std::move(outputs[i]));
    settle_one(target);
  }
}

std::vector<std::string> CountedGraph::unsettled() const {
  std::vector<std::string> names;
  for (const State& state : states_) {
    if (!state.settled) names.push_back(state.node->name());
  }
  return names;
}

}  // namespace torchspan::engine
