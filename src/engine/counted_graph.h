#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <torchspan/core/mutex.h>
#include <torchspan/engine/graph_pass.h>

#include "engine/streams.h"

namespace torchspan::engine {

/// How far a pass has come; read by any thread.
struct Progress {
  std::atomic<std::size_t> nodes{0};
  std::atomic<std::size_t> executed{0};
  std::atomic<std::size_t> skipped{0};
};

/// The nodes that a pass reaches, with what each still waits for and has got so far. Used by one thread at a
/// time, or `shared`: then several may feed and execute nodes at once, each node by one of them, and leaves
/// by one at a time. No lock is held while nodes run and gradients are added. An exception of a member that
/// runs or feeds nodes leaves it unfit for anything but destruction.
class CountedGraph {
 public:
  CountedGraph(Progress& progress, bool cuda, bool shared)
      : progress_(progress), cuda_(cuda), shared_(shared), caller_streams_(cuda) {}

  void add_local_root(torch::autograd::Edge edge, at::Tensor gradient);
  void add_pending(std::shared_ptr<torch::autograd::Node> root);
  /// Finds the nodes that the roots reach and counts their dependencies. A root's own gradient is one.
  void count();

  /// Gives the local roots their gradients.
  void start();
  /// Gives a pending root its gradients, or tells that it gets none.
  void open(torch::autograd::Node& root, Delivery delivery);
  void discard(torch::autograd::Node& root);

  /// Whether a further thread would find a node to execute.
  bool has_ready();
  bool is_done() const { return progress_.executed + progress_.skipped == progress_.nodes; }
  /// Takes the ready node with the highest sequence number, the one discovered first among equals. Nothing
  /// when none is ready, or only leaves while another thread executes one.
  std::optional<std::uint32_t> take_ready();
  torch::autograd::Node& node(std::uint32_t index) const { return *states_[index].node; }
  void execute(std::uint32_t index, GradientSink& sink, bool retain);

  std::vector<std::string> unsettled() const;
  void join_streams() { caller_streams_.join(); }

 private:
  struct State {
    explicit State(torch::autograd::Node* node);
    torch::autograd::Node* node;
    torch::autograd::AccumulateGrad* leaf = nullptr;
    std::uint64_t sequence;
    std::uint32_t first_edge = 0;  // of edge_count entries of edges_
    std::uint32_t edge_count = 0;
    std::uint32_t dependencies = 0;
    bool reached = false;
    bool settled = false;  // executed or skipped
    torch::autograd::variable_list inputs;
  };
  struct Ready {
    std::uint64_t sequence;
    std::uint32_t index;
    friend bool operator<(const Ready& a, const Ready& b) {
      return a.sequence != b.sequence ? a.sequence < b.sequence : a.index > b.index;
    }
  };
  struct LocalRoot {
    torch::autograd::Edge edge;
    at::Tensor gradient;
  };
  /// Holds the lock of a shared graph; of one that is not, nothing.
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
  void add_input(Guard& guard, std::uint32_t target, std::uint32_t input, at::Tensor gradient);
  // Under the lock, where there is one.
  void settle_one(std::uint32_t target);
  void skip(std::uint32_t first);
  void make_ready(std::uint32_t index);
  void distribute(std::uint32_t index, torch::autograd::variable_list outputs);

  Progress& progress_;
  const bool cuda_;
  const bool shared_;
  Mutex mutex_;  // of what feeding and executing changes, if the graph is shared
  CallerStreams caller_streams_;
  std::vector<State> states_;  // as many as count() has found; of one that is ready, its thread's
  std::vector<std::uint32_t> edges_;
  ska::flat_hash_map<torch::autograd::Node*, std::uint32_t> index_;
  std::vector<LocalRoot> local_roots_;
  std::vector<std::shared_ptr<torch::autograd::Node>> pending_;
  std::unordered_map<std::uint32_t, std::vector<bool>> masks_;  // of roots whose outputs are reached in part
  std::vector<Ready> ready_, ready_leaves_;
  bool leaf_runs_ = false;
};

}  // namespace torchspan::engine
