#include "engine/counted_graph.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include "core/api/throw_invalid.h"
#include "engine/execute.h"

namespace torchspan::engine {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

constexpr std::uint32_t kNowhere = 0xFFFFFFFF;
/// The lowest order of nodes without EdgeCounts.
constexpr std::uint64_t kUncounted = std::uint64_t{1} << 63;

std::size_t bytes_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return 0;
  if (gradient.layout() == at::kStrided) return gradient.nbytes();
  return gradient.is_sparse() ? gradient._values().nbytes() : 0;
}

}  // namespace

CountedGraph::State::State(Node* node, std::uint64_t order)
    : node(node), sequence(node->sequence_nr()), order(order) {
  if (node->num_outputs() != 0) return;
  leaf = dynamic_cast<AccumulateGrad*>(node);
  exit = dynamic_cast<PassNode*>(node);
  if (leaf != nullptr) sequence = PassNode::kFirstSequence - 1;  // after exits, before all others
}

void CountedGraph::add_local_root(Edge edge, at::Tensor gradient) {
  if (!edge.is_valid()) throw_invalid("a root of a pass needs a node, but this edge has none");
  variable_list gradients{std::move(gradient)};
  const c10::AutoGradMode grad_mode(false);
  fit_gradients({edge}, gradients);
  local_roots_.push_back({std::move(edge), std::move(gradients[0])});
}

void CountedGraph::add_pending(NodePtr root) { pending_.push_back(std::move(root)); }

std::uint32_t CountedGraph::index_of(Node* node) {
  const auto next = static_cast<std::uint32_t>(states_.size());
  auto [found, is_new] = index_.emplace(node, next);
  if (!is_new) return found->second;
  const auto known = counts_ ? counts_->find(*node) : std::nullopt;
  if (in_place_ && next == states_.capacity())
    throw_invalid("the graph's edges were changed after it was counted");
  states_.emplace_back(node, known ? known->order : kUncounted + next);
  if (known) {
    states_.back().counted = true;
    states_.back().dependencies = states_.back().outside = states_.back().feeders = known->edges;
  }
  return next;
}

std::uint32_t CountedGraph::index_of_root(Node& root) {
  const std::size_t found = states_.size();
  const std::uint32_t index = index_of(&root);
  if (index < found) return index;
  ++states_[index].dependencies;  // the gradients to be delivered to it
  discover();
  return index;
}

void CountedGraph::count() {
  ordered_ = shared_ || counts_ || !pending_.empty();
  std::vector<std::uint32_t> ends;
  for (const auto& root : pending_) {
    ++states_[index_of(root.get())].dependencies;
    discover();
    ends.push_back(static_cast<std::uint32_t>(states_.size()));
  }
  for (const LocalRoot& root : local_roots_) ++states_[index_of(root.edge.function.get())].dependencies;
  discover();
  ends.push_back(static_cast<std::uint32_t>(states_.size()));
  if (ordered_) place_edges(ends);
  sealed_ = counts_ == nullptr;
  in_place_ = counts_ && shared_;  // threads refer to states while further nodes are found
  if (in_place_) states_.reserve(states_.size() + counts_->size());
}

/// Nodes behind the last root get the highest places, and of those the nodes created last: they run first if
/// all gradients are present. Local roots have their turns before all edges.
void CountedGraph::place_edges(const std::vector<std::uint32_t>& ends) {
  std::uint32_t begin = 0;
  std::vector<std::uint32_t> sources;
  for (const std::uint32_t end : ends) {
    sources.clear();
    for (std::uint32_t index = begin; index < end; ++index) {
      if (!states_[index].counted && states_[index].edge_count > 0) sources.push_back(index);
    }
    begin = end;
    std::sort(sources.begin(), sources.end(), [this](std::uint32_t a, std::uint32_t b) {
      const std::uint64_t x = states_[a].sequence, y = states_[b].sequence;
      return x != y ? x < y : a > b;
    });
    for (const std::uint32_t source : sources) {
      for (std::uint32_t i = states_[source].edge_count; i-- > 0;) {
        const std::uint32_t edge = states_[source].first_edge + i;
        if (edges_[edge] != kNowhere) places_[edge] = states_[edges_[edge]].feeders++;
      }
    }
  }
  for (auto root = local_roots_.rbegin(); root != local_roots_.rend(); ++root) {
    root->place = states_[index_.at(root->edge.function.get())].feeders++;
  }
}

void CountedGraph::discover() {
  for (std::size_t index = discovered_; index < states_.size(); ++index) {
    const auto& edges = states_[index].node->next_edges();
    states_[index].first_edge = static_cast<std::uint32_t>(edges_.size());
    states_[index].edge_count = static_cast<std::uint32_t>(edges.size());
    if (ordered_) {
      EdgeCounts::Places places(edges.size());
      if (states_[index].counted) places = counts_->places(*states_[index].node);
      places_.insert(places_.end(), places.begin(), places.end());
    }
    for (const Edge& edge : edges) {
      const std::uint32_t target = edge.is_valid() ? index_of(edge.function.get()) : kNowhere;
      edges_.push_back(target);
      if (target == kNowhere) continue;
      if (states_[index].counted) {
        --states_[target].outside;  // already counted as a dependency
      } else {
        ++states_[target].dependencies;
      }
    }
  }
  discovered_ = states_.size();
  progress_.nodes = states_.size();
}

void CountedGraph::seal(const std::vector<Node*>& roots) {
  Guard guard(*this);
  for (Node* root : roots) index_of_root(*root);
  sealed_ = true;
  keep_found_turns();
  const auto found = static_cast<std::uint32_t>(states_.size());
  for (std::uint32_t index = 0; index < found; ++index) {
    const std::uint32_t outside = std::exchange(states_[index].outside, 0);
    if (outside == 0) continue;
    if (auto next = states_[index].feeding ? std::nullopt : take_aside(index)) feed(guard, std::move(*next));
    settle(guard, index, outside);
  }
}

/// None of these turns is over: places descend, and no turn after a gap has come yet.
void CountedGraph::keep_found_turns() {
  for (const State& source : states_) {
    for (std::uint32_t edge = source.first_edge; edge < source.first_edge + source.edge_count; ++edge) {
      if (edges_[edge] == kNowhere) continue;
      const State& target = states_[edges_[edge]];
      if (target.outside != 0 && places_[edge] < target.feeders - target.fed)
        turns_[edges_[edge]].push_back(places_[edge]);
    }
  }
  for (auto& [target, turns] : turns_) std::sort(turns.begin(), turns.end());
}

void CountedGraph::start() {
  Guard guard(*this);
  for (LocalRoot& root : local_roots_) {
    const std::uint32_t target = index_.at(root.edge.function.get());
    streams_.hand_over(root.gradient, *root.edge.function);
    feed_and_settle(guard, {target, root.edge.input_nr, root.place, true, std::move(root.gradient)});
  }
}

void CountedGraph::open(Node& root, Delivery delivery) {
  const std::size_t expected = root.num_inputs();
  if (expected != 0 && delivery.gradients.size() != expected) {
    throw_invalid("{} gradients were delivered to a node that takes {}", delivery.gradients.size(), expected);
  }
  for (at::Tensor& gradient : delivery.gradients) streams_.hand_over(gradient, root);
  Guard guard(*this);
  const std::uint32_t target = index_of_root(root);
  State& state = states_[target];
  state.reached = true;
  state.inputs.resize(std::max(state.inputs.size(), delivery.gradients.size()));
  for (std::uint32_t input = 0; input < delivery.gradients.size(); ++input) {
    add_input(guard, target, input, std::move(delivery.gradients[input]));
  }
  if (!delivery.reached.empty()) masks_[target] = std::move(delivery.reached);
  settle(guard, target, 1);
}

/// Adds without the lock: another thread that brings a gradient meanwhile finds the input empty and sets it.
/// The gradient has been delivered: the stream on which the node uses it waits for it.
void CountedGraph::add_input(Guard& guard, std::uint32_t target, std::uint32_t input, at::Tensor gradient) {
  State& state = states_[target];
  state.reached = true;
  if (state.inputs.size() <= input) state.inputs.resize(std::max(state.node->num_inputs(), input + 1));
  if (state.exit != nullptr && state.inputs.size() > 1) {
    auto& reached = reached_inputs_[target];
    reached.resize(state.inputs.size());
    reached[input] = true;
  }
  if (!gradient.defined()) return;
  device::StreamsScope scope;
  if (streams_.any() && device::has_streams(gradient.device()))
    scope.enter(streams_.of(*state.node, gradient.device()));
  while (state.inputs[input].defined()) {
    at::Tensor held = std::move(state.inputs[input]);
    guard.unlock();
    gradient = sum_of(std::move(held), std::move(gradient));
    guard.lock();
  }
  state.inputs[input] = std::move(gradient);
}

bool CountedGraph::has_turn(const Contribution& contribution) const {
  const State& state = states_[contribution.target];
  const auto turns = turns_.empty() ? turns_.end() : turns_.find(contribution.target);
  if (turns != turns_.end()) return !turns->second.empty() && turns->second.back() == contribution.place;
  return contribution.place + state.fed + 1 == state.feeders;
}

void CountedGraph::end_turn(std::uint32_t target) {
  ++states_[target].fed;
  --states_[target].dependencies;
  if (const auto turns = turns_.find(target); turns != turns_.end()) turns->second.pop_back();
}

void CountedGraph::put_aside(Contribution contribution) {
  aside_bytes_ += bytes_of(contribution.gradient);
  aside_[contribution.target].emplace(contribution.place, std::move(contribution));
}

std::optional<CountedGraph::Contribution> CountedGraph::take_aside(std::uint32_t target) {
  const auto found = aside_.empty() ? aside_.end() : aside_.find(target);
  if (found == aside_.end()) return std::nullopt;
  auto last = std::prev(found->second.end());
  if (!has_turn(last->second)) return std::nullopt;
  Contribution contribution = std::move(last->second);
  aside_bytes_ -= bytes_of(contribution.gradient);
  found->second.erase(last);
  if (found->second.empty()) aside_.erase(found);
  return contribution;
}

/// While a thread feeds a node, other threads put their contributions aside for it. Beyond kMaxHeldBytes bytes a
/// gradient is added at once, and only its turn is kept.
void CountedGraph::feed(Guard& guard, Contribution contribution) {
  const std::uint32_t target = contribution.target;
  if (!ordered_) {
    if (contribution.reached) add_input(guard, target, contribution.input, std::move(contribution.gradient));
    --states_[target].dependencies;
    return;
  }
  State& state = states_[target];
  const bool in_turn = has_turn(contribution);
  const bool too_much = aside_bytes_ + bytes_of(contribution.gradient) > kMaxHeldBytes;
  if (state.feeding || (!in_turn && !too_much)) return put_aside(std::move(contribution));
  state.feeding = true;
  std::optional<Contribution> next;
  if (in_turn) {
    next = std::move(contribution);
  } else {
    if (contribution.reached)
      add_input(guard, target, contribution.input, std::exchange(contribution.gradient, {}));
    put_aside(std::move(contribution));
    next = take_aside(target);
  }
  for (; next; next = take_aside(target)) {
    if (next->reached) add_input(guard, target, next->input, std::move(next->gradient));
    end_turn(target);
  }
  state.feeding = false;
}

void CountedGraph::feed_and_settle(Guard& guard, Contribution contribution) {
  const std::uint32_t target = contribution.target;
  feed(guard, std::move(contribution));
  settle(guard, target, 0);
}

void CountedGraph::settle(Guard& guard, std::uint32_t target, std::uint32_t dependencies) {
  State& state = states_[target];
  state.dependencies -= dependencies;
  if (state.dependencies > 0 || state.feeding) return;
  if (state.reached) {
    make_ready(target);
  } else {
    skip(guard, target);
  }
}

void CountedGraph::skip(Guard& guard, std::uint32_t first) {
  std::vector<std::uint32_t> unreached{first};
  while (!unreached.empty()) {
    State& state = states_[unreached.back()];
    unreached.pop_back();
    ++progress_.skipped;
    for (std::uint32_t edge = state.first_edge; edge < state.first_edge + state.edge_count; ++edge) {
      const std::uint32_t target = edges_[edge];
      if (target == kNowhere) continue;
      feed(guard, {target, 0, ordered_ ? places_[edge] : 0, false, {}});
      if (states_[target].dependencies > 0) continue;
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
  ready.push_back({state.sequence, state.order, index});
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
  if (state.edge_count == 0 && streams_.any()) {
    Guard guard(*this);
    streams_.ends_at(*state.node);
  }
  const NodeStreamScope scope(*state.node, streams_);
  if (state.leaf) {
    run_leaf(*state.leaf, std::move(inputs), sink);
  } else if (state.exit) {
    run_exit(index, std::move(inputs), sink);
  } else {
    distribute(index, run_node(*state.node, std::move(inputs), sink, retain));
  }
  if (state.leaf) {
    Guard guard(*this);
    leaf_runs_ = false;
  }
  ++progress_.executed;
}

void CountedGraph::failed_at(std::uint32_t index) {
  Guard guard(*this);
  streams_.ends_at(*states_[index].node);
}

void CountedGraph::run_exit(std::uint32_t index, variable_list inputs, GradientSink& sink) {
  std::vector<bool> reached;
  {
    Guard guard(*this);
    if (const auto found = reached_inputs_.find(index); found != reached_inputs_.end())
      reached = std::move(found->second);
  }
  run_pass_node(*states_[index].exit, std::move(inputs), reached, sink);
}

void CountedGraph::distribute(std::uint32_t index, variable_list outputs) {
  const State& state = states_[index];
  if (outputs.size() != state.edge_count) {
    throw_invalid("the node's edges were changed during its pass");
  }
  if (streams_.any()) {
    for (std::uint32_t i = 0; i < state.edge_count; ++i) {
      const Edge& edge = state.node->next_edge(i);
      if (edge.is_valid()) streams_.hand_over(outputs[i], *edge.function);
    }
  }
  Guard guard(*this);
  const auto found = masks_.empty() ? masks_.end() : masks_.find(index);
  const std::vector<bool>* mask = found == masks_.end() ? nullptr : &found->second;
  for (std::uint32_t i = 0; i < state.edge_count; ++i) {
    const std::uint32_t target = edges_[state.first_edge + i];
    if (target == kNowhere) continue;
    const bool reached = mask == nullptr || (i < mask->size() && (*mask)[i]);
    const std::uint32_t place = ordered_ ? places_[state.first_edge + i] : 0;
    feed_and_settle(guard, {target, state.node->next_edge(i).input_nr, place, reached,
                            reached ? std::move(outputs[i]) : at::Tensor()});
  }
}

}  // namespace torchspan::engine
