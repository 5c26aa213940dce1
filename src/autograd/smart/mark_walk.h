#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <unordered_set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/edge.h>

#include "autograd/messages/messages.h"
#include "autograd/nodes/nodes.h"

namespace torchspan::autograd {

/// SMART: the walk over this worker's graph that finds the receive nodes, with outputs, that a pass reaches.
/// It follows edges and runs nothing. Marks that were found and not sent yet wait in take_unsent(). Not
/// thread-safe.
class MarkWalk {
 public:
  explicit MarkWalk(std::uint64_t context) : context_(context) {}
  /// Continues from `edges` over nodes that were not walked before. Throws as RecvNode::check_context().
  void walk(const std::vector<torch::autograd::Edge>& edges);
  /// The new marks, by the rank of the worker that sent those tensors.
  std::map<std::uint32_t, std::vector<MarkedSend>> take_unsent();
  /// Which of the first `outputs` outputs of a receive node are reached.
  std::vector<std::uint8_t> reached(const RecvNode& node, std::size_t outputs) const;

 private:
  void reach(const RecvNode& node, std::uint32_t output);

  const std::uint64_t context_;
  std::unordered_set<const torch::autograd::Node*> walked_;
  std::map<const RecvNode*, std::set<std::uint32_t>> reached_;
  std::map<const RecvNode*, std::vector<std::uint32_t>> unsent_;
};

}  // namespace torchspan::autograd
