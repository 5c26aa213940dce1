#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/edge.h>

#include <torchspan/detail/core/mutex.h>

#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"
#include "autograd/nodes.h"
#include "autograd/passes/pass_graph.h"

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

/// SMART: the marks and gradients of one send that a pass reaches. Every output that received a gradient must
/// also be marked before the pass may end on this worker, because only marks cause further marks. Not
/// thread-safe.
class SendMarks {
 public:
  explicit SendMarks(SendNodePtr send) : send_(std::move(send)) {}
  const SendNodePtr& send() const { return send_; }
  void mark(const std::vector<std::uint32_t>& outputs) { marked_.insert(outputs.begin(), outputs.end()); }
  /// Records gradients for the outputs that are reached. False if the gradients came before.
  bool deliver(const std::vector<std::uint8_t>& reached);
  bool is_marked() const { return !marked_.empty(); }
  /// Whether every output that received a gradient is marked.
  bool agree() const;

 private:
  SendNodePtr send_;
  std::set<std::uint32_t> marked_;
  std::set<std::uint32_t> delivered_;
  bool has_gradients_ = false;
};

/// SMART: what one worker's part of a pass knows about marks: which receive nodes and sends the pass reaches,
/// and how many requests keep its marking from being over. Sends no messages (PassState does) and runs no
/// nodes; adds the sends that it learns of to the pass's graph. Thread-safe.
class SmartMarks {
 public:
  /// The entries of a MarkSends with their nodes.
  using Marks = std::vector<std::pair<SendNodePtr, MarkedSend>>;
  struct Delivered {
    bool twice = false;      ///< the gradients of this send came before
    bool disagrees = false;  ///< an output without a mark: the pass must stay open until mark() settles it
  };
  struct Marked {
    std::size_t settled = 0;  ///< disagreements
    bool sealed = false;  ///< the pass's graph after a gradient came: a thread must run what becomes ready
  };
  /// The state of the marking when its last request has been answered.
  struct Round {
    std::optional<Answer<MarkSends>> parent;
    std::vector<std::uint32_t> unmarked_workers;
  };

  /// `rank` is this worker's.
  SmartMarks(std::uint64_t context, std::uint32_t rank, PassGraph& graph)
      : rank_(rank), graph_(graph), walk_(context) {}

  /// This worker began the pass: no other worker waits for its marking.
  void set_root() { is_root_ = true; }
  bool is_root() const { return is_root_; }
  /// Walks from the losses. Counts a request, which end_request() ends.
  void begin(const std::vector<at::Tensor>& roots);
  /// Records marks and walks from them. Counts a request, which end_request() ends. Takes the answer if these
  /// marks begin a round of marking here.
  Marked mark(const Marks& marks, Answer<MarkSends>& answer);
  /// Records gradients and walks from the outputs they reach, so that the gradients that this worker sends
  /// name the right outputs. Sends no marks for that. May seal the graph, which the caller runs after it has
  /// delivered the gradients.
  Delivered deliver(const SendNodePtr& send, const std::vector<std::uint8_t>& reached);
  /// The new marks by rank. Counts one request for each rank.
  std::map<std::uint32_t, std::vector<MarkedSend>> take_unsent();
  /// Records workers that had sends without a mark.
  void add_unmarked_workers(const std::vector<std::uint32_t>& ranks);
  /// Returns the finished round if this was the last request.
  std::optional<Round> end_request();
  /// Takes the answer that the round of marking owes.
  std::optional<Answer<MarkSends>> take_parent();

  /// Whether a send of this worker has no mark.
  bool has_unmarked() const;
  /// Which of the first `outputs` outputs of a receive node are reached.
  std::vector<std::uint8_t> reached(const RecvNode& node, std::size_t outputs) const;
  std::vector<SendNodePtr> reached_sends() const;
  std::vector<SendNodePtr> marked_sends() const;
  /// Those of `messages` that the pass is not known to reach.
  std::vector<MessageInfo> unreached(std::vector<MessageInfo> messages) const;

 private:
  SendMarks& join(const SendNodePtr& send) TORCHSPAN_REQUIRES(mutex_);
  bool seal_if_complete() TORCHSPAN_REQUIRES(mutex_);

  const std::uint32_t rank_;
  PassGraph& graph_;
  std::atomic<bool> is_root_{false};
  mutable Mutex mutex_;
  MarkWalk walk_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint64_t, SendMarks> reached_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t marked_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  // of reached_
  bool has_delivered_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::set<std::uint64_t> disagreements_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t requests_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::optional<Answer<MarkSends>> parent_ TORCHSPAN_GUARDED_BY(mutex_);
  std::set<std::uint32_t> unmarked_workers_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
