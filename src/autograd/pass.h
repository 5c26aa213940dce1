#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/autograd/context.h>
#include <torchspan/engine/gradient_map.h>
#include <torchspan/engine/graph_pass.h>

#include "autograd/marks.h"
#include "autograd/messages.h"
#include "autograd/state.h"

namespace torchspan::autograd {

/// What all workers know of a pass from the first message on.
struct PassKey {
  std::uint64_t id = 0;
  bool retain_graph = false;
  PassMode mode = PassMode::kSmart;
};

/// One worker's part of one backward pass: its local graph, fed by gradients that arrive for the sends, and
/// the gradients it sends back. Every send of the context is waited for. SMART: marks travel beside the
/// gradients, and once all are made, sends without a mark are not waited for any more. Thread-safe.
class PassState : public std::enable_shared_from_this<PassState> {
 public:
  PassState(Worker worker, std::shared_ptr<ContextState> context, PassKey key);

  std::uint64_t id() const { return key_.id; }
  const std::shared_ptr<ContextState>& context() const { return context_; }

  /// Counts the dependencies of the loss's graph and of all sends. Once, by whoever began the pass.
  void prepare(const std::vector<at::Tensor>& roots);
  /// Gradients for the tensors of one message of ours.
  void receive(PropagateGradients message);
  /// The first gradients of the pass here: whoever sent them waits for this worker's part.
  bool claim_first_gradients() { return !had_gradients_.exchange(true); }
  /// Marks for messages of ours; see MarkSends.
  Future<MarkedWorkers> mark(const std::vector<MarkedSend>& sends);
  /// All marks are made.
  void marks_are_final();
  /// Does the work that is ready, on this thread.
  void drive();
  /// RecvNode: sends gradients to the worker that the tensors came from.
  void send_back(const RecvNode& node, torch::autograd::variable_list gradients);

  /// The first failure ends the pass here and tells everybody who may take part.
  void fail(const Error& error);
  /// Somebody else's failure; told on to those that may not know.
  void aborted_elsewhere(const std::string& reason);
  /// Calls back when this worker's part is over, the answers to its gradients included.
  void after(engine::PassEnd::Callback callback) { sink_.after_pass(std::move(callback)); }
  void wait(Deadline deadline) { sink_.end()->wait(deadline); }
  /// Sends that still wait for their gradient, for the report of a stall.
  std::string describe_waiting() const;

 private:
  void end(const engine::PassStatus& status);
  std::vector<std::shared_ptr<SendNode>> used_sends();
  void walk_from(const SendNode& send, const std::vector<std::uint8_t>& reached);
  Future<MarkedWorkers> take_marks(const std::vector<MarkedSend>& sends);
  void begin_marking(const std::vector<at::Tensor>& roots);
  void tell_marks();
  void note_marked(const std::vector<std::uint32_t>& ranks);
  void end_errand();
  bool is_root() const { return is_root_.load(); }
  std::string blame(const Error& error) const;
  void tell_abort(const std::string& reason);

  const Worker worker_;
  const std::shared_ptr<ContextState> context_;
  const PassKey key_;
  ContextSink sink_;
  engine::GraphPass graph_;
  std::vector<std::shared_ptr<SendNode>> sends_;
  std::atomic<bool> told_{false};
  std::atomic<bool> had_gradients_{false};
  std::atomic<bool> is_root_{false};

  // SMART. An errand is a MarkSends of ours that has not been answered; while there is one, this worker is in
  // the middle of marking on behalf of `parent_` (the root: of nobody).
  Mutex marks_mutex_;
  MarkWalk walk_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::map<std::uint64_t, SendMarks> marks_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::map<std::uint64_t, Promise<void>> disagreements_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::size_t errands_ TORCHSPAN_GUARDED_BY(marks_mutex_) = 0;
  std::optional<Promise<MarkedWorkers>> parent_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::set<std::uint32_t> marked_workers_ TORCHSPAN_GUARDED_BY(marks_mutex_);
};

}  // namespace torchspan::autograd
