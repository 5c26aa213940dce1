#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/edge.h>

#include "autograd/messages.h"
#include "autograd/nodes.h"

namespace torchspan::autograd {

/// Which of this worker's receive nodes a pass reaches, and by which outputs, as far as is known: the walk
/// that SMART mode makes ahead of the gradients. What was found and not yet told waits in take_untold(). Not
/// thread-safe.
class MarkWalk {
 public:
  explicit MarkWalk(std::uint64_t context) : context_(context) {}
  /// Walks on from `edges` over nodes that were not walked before. Throws as check_context().
  void walk(const std::vector<torch::autograd::Edge>& edges);
  /// What the workers that sent those tensors must hear, by rank.
  std::map<std::uint32_t, std::vector<MarkedSend>> take_untold();
  /// Which of the first `outputs` outputs of a receive node are reached.
  std::vector<std::uint8_t> reached(const RecvNode& node, std::size_t outputs) const;

 private:
  void reach(const RecvNode& node, std::uint32_t output);

  const std::uint64_t context_;
  std::unordered_set<const torch::autograd::Node*> walked_;
  std::map<const RecvNode*, std::set<std::uint32_t>> reached_;
  std::map<const RecvNode*, std::vector<std::uint32_t>> untold_;
};

/// Throws Error{kInvalid} when a graph leads through a message of another context.
void check_context(const RecvNode& node, std::uint64_t context);

/// A send that a pass reaches, and how far its marks and its gradients are in agreement: every output that a
/// gradient came for must be marked too before the pass may end here, since only marks are told on. Not
/// thread-safe.
class SendMarks {
 public:
  explicit SendMarks(std::shared_ptr<SendNode> send) : send_(std::move(send)) {}
  const std::shared_ptr<SendNode>& send() const { return send_; }
  void mark(const std::vector<std::uint32_t>& outputs) { marked_.insert(outputs.begin(), outputs.end()); }
  /// False the second time: gradients come once.
  bool deliver(const std::vector<std::uint8_t>& reached);
  bool is_marked() const { return !marked_.empty(); }
  /// No gradient has come for an output that was not marked.
  bool agree() const;

 private:
  std::shared_ptr<SendNode> send_;
  std::set<std::uint32_t> marked_;
  std::set<std::uint32_t> delivered_;
  bool has_gradients_ = false;
};

}  // namespace torchspan::autograd
