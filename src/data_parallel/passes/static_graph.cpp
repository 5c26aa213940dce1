#include "data_parallel/passes/static_graph.h"

#include <algorithm>
#include <numeric>

namespace torchspan::data_parallel {

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

}  // namespace torchspan::data_parallel
