#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <c10/util/SmallVector.h>

#include <torchspan/detail/core/mutex.h>

namespace torch::autograd {
struct Node;
}

namespace torchspan::engine {

/// Counts the edges that lead to each node of a graph that grows root by root; each node is walked once. A
/// pass through a part of that graph learns from it how many inputs of a node come from outside the part.
/// Keeps no node alive. Thread-safe.
class EdgeCounts {
 public:
  struct Known {
    std::uint32_t edges = 0;
    std::uint64_t order = 0;  ///< grows from node to node in the order in which they were walked
  };

  /// The place of each edge of a node among those that lead to the same node: later roots come after earlier
  /// ones and, behind one root, nodes in the order of their sequence numbers.
  using Places = c10::SmallVector<std::uint32_t, 2>;

  /// Walks `root` and what lies behind it, except what was walked before. Returns the number of nodes walked.
  std::size_t add(const std::shared_ptr<torch::autograd::Node>& root);
  /// Nothing for a node that was not walked.
  std::optional<Known> find(torch::autograd::Node& node) const;
  /// Of a node that was walked.
  Places places(torch::autograd::Node& node) const;
  /// How many nodes it remembers; some of them may be gone.
  std::size_t size() const;

 private:
  static constexpr std::size_t kSweepAt = 1024;
  struct Entry {
    std::weak_ptr<torch::autograd::Node> node;  // another node may come to lie where one that ended was
    Known known;
    Places places = {};
  };
  void meet(const std::shared_ptr<torch::autograd::Node>& node) TORCHSPAN_REQUIRES(mutex_);
  void forget_ended() TORCHSPAN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::unordered_map<torch::autograd::Node*, Entry> nodes_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<torch::autograd::Node*> fresh_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t walked_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t sweep_at_ TORCHSPAN_GUARDED_BY(mutex_) = kSweepAt;
};

}  // namespace torchspan::engine
