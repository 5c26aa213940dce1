#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "engine/api/node_ptr.h"

namespace torchspan::engine {

/// When a pass in two parts runs a node.
enum class NodePart : std::uint8_t {
  kInputs,    ///< in the first part: all its edges lead to the input nodes
  kBoth,      ///< in each part, for the edges of that part
  kHeldBack,  ///< once in the first part; its gradients for weights wait for the second
  kWeights,   ///< in the second part: no edge leads to an input node
};

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

  SplitGraph(const torch::autograd::edge_list& roots, const std::vector<NodePtr>& inputs);

  const std::vector<Entry>& entries() const { return entries_; }
  std::uint32_t index_of(const torch::autograd::Node& node) const { return index_.at(&node); }
  /// Whether the gradient of this edge belongs to the second part.
  bool is_for_weights(const Target& target) const {
    return target.index != kNowhere && entries_[target.index].part == NodePart::kWeights;
  }

 private:
  void discover(const torch::autograd::edge_list& roots);
  /// Puts the entries into the order in which GraphPass and LibTorch's engine run them.
  void sort(const torch::autograd::edge_list& roots);
  void divide(const std::vector<NodePtr>& inputs);

  std::vector<Entry> entries_;
  std::unordered_map<const torch::autograd::Node*, std::uint32_t> index_;
};

}  // namespace torchspan::engine
