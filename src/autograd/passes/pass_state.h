#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"
#include "autograd/passes/pass_graph.h"
#include "autograd/passes/smart_marks.h"

namespace torchspan::autograd {

class PassState;

/// Ends one worker's part of a pass: when its graph is done and everything that called enter() has left, or
/// at the first failure. A failure is sent to all workers that this one communicated with in the context.
/// Thread-safe.
class PassEnding {
 public:
  /// Where fail() closes the pass's graph, which runs callbacks of the program and destroys its objects.
  enum class Close : std::uint8_t { kHere, kOnPool };

  /// `pass` owns this object.
  explicit PassEnding(PassState& pass);

  /// Observes the end of the graph's work. Once, before the graph is prepared.
  void watch_graph();
  /// Delays the end until leave(). Throws the failure, or Error{kCancelled} after the end.
  void enter();
  void leave();

  /// Ends the pass with its first failure; ignored after the end.
  void fail(const Error& failure, Close close = Close::kHere);
  /// The same for a failure on this worker: adds the worker's name.
  void fail_here(const Error& cause, Close close = Close::kHere);
  /// The same for a node of this worker's graph that failed.
  void fail_in_node();
  /// The same for a worker that is gone or cannot be reached: names the calls between it and this worker,
  /// `through` among them.
  void fail_without(std::uint32_t rank, const Error& cause, const std::string& through = "",
                    Close close = Close::kHere);
  /// Fails the pass on the program's behalf, on another thread.
  void cancel();

  std::optional<Error> failure() const;
  /// Completes when this worker's part has ended, including the answers to its gradients, or has failed.
  Future<void> over() const { return over_.future(); }
  /// After a failure: completes when all workers that were notified of it have answered.
  Future<void> notified() const;
  /// Gives `answer` when this worker's part has ended or failed.
  void answer_when_over(Answer<PropagateGradients> answer);

 private:
  enum class Stage : std::uint8_t { kRunning, kGraphDone, kOver, kEnded, kFailed };

  void work_over(const engine::PassStatus& status);
  void end(const engine::PassStatus& status);
  void close(const Error& failure, std::optional<Promise<void>> left);
  /// Adds this worker's part to the metrics and takes it out of the context; see ContextState::end_pass().
  void leave_context(const std::optional<Error>& failure, Future<void> notified = {});
  Future<void> notify_others(const Error& failure);

  PassState& pass_;
  Promise<void> over_;
  mutable Mutex mutex_;
  Stage stage_ TORCHSPAN_GUARDED_BY(mutex_) = Stage::kRunning;
  std::size_t inside_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::optional<Promise<void>> all_left_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Answer<PropagateGradients>> answer_ TORCHSPAN_GUARDED_BY(mutex_);
  Future<void> notified_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// One worker's part of one backward pass: receives the gradients of its sends, runs the graph behind them,
/// and sends gradients back for what it received. FAST: waits for every send of the context. SMART: marks are
/// sent beside the gradients, a diffusing computation (Dijkstra and Scholten, 1980; docs/architecture/smart.md); a send
/// takes part from its first gradients or mark on, and a node to which other sends lead waits for them until all marks
/// are made. A callback that holds a reference keeps the pass alive while other threads work for it. Thread-safe.
class PassState final : public std::enable_shared_from_this<PassState> {
 public:
  PassState(const Worker& worker, std::shared_ptr<ContextState> context, PassKey key);
  PassState(const PassState&) = delete;
  PassState& operator=(const PassState&) = delete;

  std::uint64_t id() const { return key_.id; }
  std::uint32_t root() const { return maker_of(key_.id); }

  /// Counts the dependencies of the losses' graph and, in FAST mode, of all sends; `roots` is empty on all
  /// workers but the one that called backward(). Once.
  void prepare(const std::vector<at::Tensor>& roots);
  /// Takes gradients for the tensors of one message that this worker sent to `peer`.
  void receive(PropagateGradients message, std::uint32_t peer);
  /// True for the first gradients of the pass on this worker, whose answer must wait for the end of its part.
  bool claim_first_gradients() { return !had_gradients_.exchange(true); }
  /// Sends the gradients of a receive node to the worker that sent its tensors.
  void send_back(const RecvNode& node, torch::autograd::variable_list gradients);
  /// Runs the nodes that are ready, on this thread.
  void drive();
  PartReport report() const;

  /// SMART: takes marks for messages that this worker sent to `peer`. Takes `answer`, or throws, which must fail the
  /// pass.
  void mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer);
  /// The same on a thread that must not fail the pass: returns false, without effect, where mark() throws.
  bool try_mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer);
  /// SMART: all marks are made. Another thread runs the nodes that become ready.
  void marks_are_final();

  PassEnding& ending() { return ending_; }
  const PassEnding& ending() const { return ending_; }
  StrayGradients& stray_gradients() { return graph_.stray_gradients(); }
  /// Whether the pass's own graph puts its gradients into `sink`.
  bool fills(const engine::GradientSink& sink) { return &sink == &graph_.sink(); }
  /// Whether walking over its whole graph takes microseconds.
  bool is_small() const { return graph_.is_small(); }

  /// Drops a reference on a thread that must not destroy graphs: the pool destroys the last one.
  static void release_on_pool(std::shared_ptr<PassState> pass);

 private:
  friend class PassEnding;
  PassGraph::Hooks hooks();
  /// Runs `act` on the worker's pool, or on this thread after the pool has stopped. Keeps the pass alive.
  void post(UniqueFunction<void()> act);
  /// Called once if the pass ends without failure, before the context is notified.
  void finish();
  PassWork work() const { return {graph_.report().executed, sent_, received_}; }
  void deliver_to_marks(const SendNodePtr& send, const std::vector<std::uint8_t>& reached);
  std::vector<MessageInfo> waits_for(const engine::PassReport& graph) const;

  /// On the root: marks what the losses reach.
  void begin_marks(const std::vector<at::Tensor>& roots);
  SmartMarks::Marks find_marked(const std::vector<MarkedSend>& sends, std::uint32_t peer) const;
  void take_marks(const SmartMarks::Marks& marks, Answer<MarkSends>& answer);
  void send_marks();
  void take_marks_answer(MarkedWorkers marked, const std::exception_ptr& error, std::uint32_t from);
  void end_marks_request();
  void drive_soon();

  const WeakWorker worker_;
  const std::uint32_t rank_;
  const std::shared_ptr<ContextState> context_;
  const PassKey key_;
  const std::shared_ptr<Outbox> outbox_;
  PassGraph graph_;
  SmartMarks marks_;
  PassEnding ending_;
  std::atomic<bool> had_gradients_{false};
  std::atomic<std::uint64_t> sent_{0}, received_{0};
  /// Messages that are counted in received_ and may not have reached the graph yet.
  std::atomic<int> delivering_{0};
};

}  // namespace torchspan::autograd
