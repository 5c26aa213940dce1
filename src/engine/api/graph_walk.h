#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <torchspan/detail/core/mutex.h>

#include "engine/api/node_ptr.h"

namespace torchspan::engine {

/// Counts the edges that lead to each node of a graph that grows root by root; walks each node once. A pass
/// through a part of that graph gets from it how many inputs of a node come from outside the part. Keeps no
/// node alive. Thread-safe.
class EdgeCounts {
 public:
  struct Known {
    std::uint32_t edges = 0;
    std::uint64_t order = 0;  ///< increases from node to node in the order of the walk
  };

  /// The place of each edge of a node among the edges that lead to the same node: ordered by root, and behind
  /// one root by the sequence numbers of the nodes.
  using Places = c10::SmallVector<std::uint32_t, 2>;

  /// Walks `root` and the nodes behind it that were not walked before. Returns the number of nodes walked.
  std::size_t add(const NodePtr& root);
  /// Nullopt for a node that was not walked.
  std::optional<Known> find(torch::autograd::Node& node) const;
  /// `node` must have been walked.
  Places places(torch::autograd::Node& node) const;
  /// How many nodes have an entry; some of them may have been destroyed.
  std::size_t size() const;

 private:
  static constexpr std::size_t kSweepAt = 1024;
  struct Entry {
    WeakNodePtr node{NodePtr()};  // detects a new node at the address of a destroyed one
    Known known;
    Places places = {};
  };
  void visit(const NodePtr& node) TORCHSPAN_REQUIRES(mutex_);
  void erase_destroyed() TORCHSPAN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::unordered_map<torch::autograd::Node*, Entry> nodes_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<torch::autograd::Node*> fresh_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t walked_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t sweep_at_ TORCHSPAN_GUARDED_BY(mutex_) = kSweepAt;
};

/// The leaves (parameters and inputs that require grad) that the graphs of `roots` reach, once each, in the
/// order of discovery. A backward pass from `roots` gives them gradients.
std::vector<at::Tensor> leaf_tensors(const std::vector<at::Tensor>& roots);

}  // namespace torchspan::engine
