#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <torchspan/detail/core/mutex.h>

#include "engine/api/graph_pass.h"
#include "engine/api/graph_walk.h"
#include "engine/streams.h"

namespace torchspan::engine {

/// The progress of a pass; read by any thread.
struct Progress {
  std::atomic<std::size_t> nodes{0};
  std::atomic<std::size_t> executed{0};
  std::atomic<std::size_t> skipped{0};
};

/// The nodes that a pass reaches, with their dependencies and inputs so far. Used by one thread at a time, or,
/// if `shared`, by several: each node by one of them, leaves one at a time. The order of sums does not depend
/// on the order in which gradients arrive: an early gradient is put aside until its turn, up to kMaxHeldBytes
/// bytes. No lock is held while nodes run and gradients are added. After an exception from a member that runs
/// or feeds nodes, only failed_at() and the destructor may be called. With EdgeCounts, the graph behind a pending root is
/// discovered when the root is opened, and before seal() a node waits for all counted edges.
class CountedGraph {
 public:
  static constexpr std::size_t kMaxHeldBytes = std::size_t{256} << 20;

  /// `streams` must outlive the graph.
  CountedGraph(Progress& progress, PassStreams& streams, bool shared,
               std::shared_ptr<const EdgeCounts> counts)
      : progress_(progress), streams_(streams), shared_(shared), counts_(std::move(counts)) {}

  void add_local_root(torch::autograd::Edge edge, at::Tensor gradient);
  void add_pending(NodePtr root);
  /// Finds the nodes that the roots reach and counts their dependencies. The gradient of a root counts as one.
  void count();

  /// Gives the local roots their gradients.
  void start();
  /// Gives a pending root its gradients.
  void open(torch::autograd::Node& root, Delivery delivery);
  /// Declares that these are all pending roots: nodes stop waiting for edges from other parts of the graph.
  void seal(const std::vector<torch::autograd::Node*>& roots);

  /// Whether another thread would find a node to execute.
  bool has_ready();
  bool is_done() const { return sealed_ && progress_.executed + progress_.skipped == progress_.nodes; }
  /// Takes the ready node with the highest sequence number; of equal ones, the one with the lowest order.
  /// Nullopt if none is ready, or only leaves while another thread executes one.
  std::optional<std::uint32_t> take_ready();
  torch::autograd::Node& node(std::uint32_t index) const { return *states_[index].node; }
  void execute(std::uint32_t index, GradientSink& sink, bool retain);

  /// A node of this graph has failed: the end of the pass also waits for its streams.
  void failed_at(std::uint32_t index);

 private:
  struct State {
    State(torch::autograd::Node* node, std::uint64_t order);
    torch::autograd::Node* node;
    torch::autograd::AccumulateGrad* leaf = nullptr;
    PassNode* exit = nullptr;
    std::uint64_t sequence;
    std::uint64_t order;           // independent of the order in which gradients arrive
    std::uint32_t first_edge = 0;  // of edge_count entries of edges_
    std::uint32_t edge_count = 0;
    std::uint32_t dependencies = 0;
    std::uint32_t outside = 0;  // of those: edges from counted nodes that this pass has not found
    std::uint32_t feeders = 0;  // edges and local roots that lead here, including those outside
    std::uint32_t fed = 0;      // how many of them have had their turn
    bool counted = false;       // by counts_
    bool feeding = false;       // a thread adds inputs, possibly without the lock
    bool reached = false;
    torch::autograd::variable_list inputs;
  };
  struct Ready {
    std::uint64_t sequence;
    std::uint64_t order;
    std::uint32_t index;
    friend bool operator<(const Ready& a, const Ready& b) {
      return a.sequence != b.sequence ? a.sequence < b.sequence : a.order > b.order;
    }
  };
  struct LocalRoot {
    torch::autograd::Edge edge;
    at::Tensor gradient;
    std::uint32_t place = 0;
  };
  /// The gradient, or none, that an edge or a local root contributes to an input of a node. The contributions
  /// of a node are added by descending place.
  struct Contribution {
    std::uint32_t target = 0;
    std::uint32_t input = 0;
    std::uint32_t place = 0;
    bool reached = false;
    at::Tensor gradient;
  };
  /// Holds the lock of a shared graph; no effect if the graph is not shared.
  class Guard {
   public:
    explicit Guard(CountedGraph& graph) : mutex_(graph.shared_ ? &graph.mutex_ : nullptr) { lock(); }
    ~Guard() { unlock(); }
    Guard(const Guard&) = delete;
    void lock() TORCHSPAN_UNCHECKED {
      if (mutex_ != nullptr && !std::exchange(held_, true)) mutex_->lock();
    }
    void unlock() TORCHSPAN_UNCHECKED {
      if (mutex_ != nullptr && std::exchange(held_, false)) mutex_->unlock();
    }

   private:
    Mutex* const mutex_;
    bool held_ = false;
  };

  std::uint32_t index_of(torch::autograd::Node* node);
  /// Finds the nodes behind those that were found last.
  void discover();
  std::uint32_t index_of_root(torch::autograd::Node& root);
  /// Assigns places to the edges of nodes without EdgeCounts. The nodes before `ends[i]`, and after ends[i - 1],
  /// are behind root i and behind no earlier root.
  void place_edges(const std::vector<std::uint32_t>& ends);
  /// Drops the turns of edges that are not in this pass.
  void keep_found_turns();
  void add_input(Guard& guard, std::uint32_t target, std::uint32_t input, at::Tensor gradient);
  // The members below are called under the lock, if the graph is shared.
  /// Adds a contribution, or puts it aside until its turn; then adds those whose turn has come.
  void feed(Guard& guard, Contribution contribution);
  void feed_and_settle(Guard& guard, Contribution contribution);
  bool has_turn(const Contribution& contribution) const;
  void end_turn(std::uint32_t target);
  void put_aside(Contribution contribution);
  std::optional<Contribution> take_aside(std::uint32_t target);
  void settle(Guard& guard, std::uint32_t target, std::uint32_t dependencies);
  void skip(Guard& guard, std::uint32_t first);
  void make_ready(std::uint32_t index);
  void run_exit(std::uint32_t index, torch::autograd::variable_list inputs, GradientSink& sink);
  void distribute(std::uint32_t index, torch::autograd::variable_list outputs);

  Progress& progress_;
  PassStreams& streams_;  // changed under the lock
  const bool shared_;
  const std::shared_ptr<const EdgeCounts> counts_;
  Mutex mutex_;                // guards what feeding and executing change, if the graph is shared
  std::vector<State> states_;  // a ready node's state belongs to its thread; a shared graph never moves them
  std::size_t discovered_ = 0;
  bool in_place_ = false;  // states_ must not reallocate
  bool sealed_ = true;
  bool ordered_ = false;  // false: sums follow the order in which nodes run, which is always the same
  std::vector<std::uint32_t> edges_;
  std::vector<std::uint32_t> places_;  // of edges_, if sums are ordered
  std::unordered_map<std::uint32_t, std::map<std::uint32_t, Contribution>> aside_;  // by target and place
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> turns_;  // remaining turns of nodes with gaps
  std::size_t aside_bytes_ = 0;
  ska::flat_hash_map<torch::autograd::Node*, std::uint32_t> index_;
  std::vector<LocalRoot> local_roots_;
  std::vector<NodePtr> pending_;
  std::unordered_map<std::uint32_t, std::vector<bool>> masks_;  // of roots with outputs that are not reached
  std::unordered_map<std::uint32_t, std::vector<bool>> reached_inputs_;  // of exits with several inputs
  std::vector<Ready> ready_, ready_leaves_;
  bool leaf_runs_ = false;
};

}  // namespace torchspan::engine
