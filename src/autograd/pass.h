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
#include <torchspan/detail/engine/gradient_map.h>

#include "autograd/exchange.h"
#include "autograd/marks.h"
#include "autograd/messages.h"
#include "autograd/outbox.h"
#include "autograd/state.h"
#include "autograd/stray_gradients.h"
#include "engine/api/graph_pass.h"

namespace torchspan::autograd {

/// What all workers know of a pass from the first message on.
struct PassKey {
  std::uint64_t id = 0;
  bool retain_graph = false;
  PassMode mode = PassMode::kSmart;
  std::uint32_t threads = 1;

  static constexpr std::uint32_t kMostThreads = 64;
};

/// A failure as the other workers of the pass are told it.
Error as_told(const Error& failure, const std::string& worker);
/// `cause`, naming `worker` if it does not yet.
Error located(const Error& cause, const std::string& worker);

/// One worker's part of one backward pass: its local graph, fed by gradients that arrive for the sends, and
/// the gradients it sends back. FAST: every send of the context is waited for. SMART: marks travel beside the
/// gradients; what lies behind a send becomes a part of the pass with its gradient or mark, and a node to
/// which other sends lead waits for them until all marks are made. Thread-safe.
class PassState : public std::enable_shared_from_this<PassState> {
 public:
  PassState(const Worker& worker, std::shared_ptr<ContextState> context, PassKey key);

  std::uint64_t id() const { return key_.id; }
  std::uint32_t root() const { return maker_of(key_.id); }

  /// Counts the dependencies of the loss's graph and, in FAST mode, of all sends. Once, by whoever began the
  /// pass.
  void prepare(const std::vector<at::Tensor>& roots);
  /// Gradients for the tensors of one message of ours, from `peer`.
  void receive(PropagateGradients message, std::uint32_t peer);
  /// The first gradients of the pass here: whoever sent them waits for this worker's part.
  bool claim_first_gradients() { return !had_gradients_.exchange(true); }
  /// Marks for messages of ours, from `peer`; see MarkSends. Takes the answer, or throws.
  void mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer);
  /// The same on a thread that must not fail the pass: false, and nothing has happened, where it would.
  bool try_mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer);
  /// Whether walking over all of its graph takes a moment only.
  bool is_small() const { return nodes_ <= kSmall; }
  /// All marks are made. Short: the work that this sets free is done by another thread.
  void marks_are_final();
  /// Does the work that is ready, on this thread.
  void drive();
  /// Whether this is where the pass's own graph puts gradients.
  bool fills(const engine::GradientSink& sink) const { return &sink == &sink_; }
  StrayGradients& stray_gradients() { return stray_gradients_; }
  /// RecvNode: sends gradients to the worker that the tensors came from.
  void send_back(const RecvNode& node, torch::autograd::variable_list gradients);

  /// Where the graph of a failed pass is closed, which runs callbacks of others and ends values of theirs.
  enum class Close : std::uint8_t { kHere, kOnPool };
  /// The first failure ends the pass here, at once, and is told to everybody who may take part.
  void fail(const Error& failure, Close close = Close::kHere);
  /// The same for what this worker has met itself: adds who and where.
  void fail_here(const Error& cause, Close close = Close::kHere);
  /// The same for a worker that is gone or cannot be reached: names the calls that dealt with it, `through`
  /// among them.
  void fail_without(std::uint32_t rank, const Error& cause, const std::string& through = "",
                    Close close = Close::kHere);
  /// The program wants no more of it. Whoever asks for that does not do the work.
  void cancel();
  std::optional<Error> failure() const;
  /// Completes when this worker's part is over, the answers to its gradients included, or has failed.
  Future<void> over() const { return over_.future(); }
  /// Tells the worker whose gradients were the first, then.
  void tell_part_over(Answer<PropagateGradients> answer);
  /// Gives up a reference to a pass on a thread that frees no graphs: the last one goes elsewhere.
  static void let_go(std::shared_ptr<PassState> pass);
  /// After a failure: completes when everybody that was told has answered.
  Future<void> told() const;
  PartReport report() const;

 private:
  enum class Stage : std::uint8_t { kRunning, kGraphDone, kOver, kEnded, kFailed };
  static constexpr std::size_t kMostNamed = 5;
  static constexpr std::size_t kSmall = 1000;

  void work_over(const engine::PassStatus& status);
  PassWork work() const;
  void end(const engine::PassStatus& status);
  /// Puts the end off until leave(); throws the failure, or Error{kCancelled}, when it has come.
  void enter();
  void leave();
  /// Leaves `act` to another thread.
  void post(UniqueFunction<void(PassState&)> act);
  Worker worker() const;
  engine::PassOptions options();
  void close(const Error& failure, std::optional<Promise<void>> left);
  void use_up_sends();
  void report_stray_gradients();
  void walk_from(const std::shared_ptr<SendNode>& send, const std::vector<std::uint8_t>& reached);
  /// Marks, with the nodes that they are for.
  using Marks = std::vector<std::pair<std::shared_ptr<SendNode>, MarkedSend>>;
  Marks find(const std::vector<MarkedSend>& sends, std::uint32_t peer) const;
  std::shared_ptr<SendNode> find_send(std::uint64_t message, std::uint32_t peer) const;
  void take_marks(const Marks& marks, Answer<MarkSends>& answer);
  void hear_marked(MarkedWorkers marked, const std::exception_ptr& error, std::uint32_t from);
  void begin_marking(const std::vector<at::Tensor>& roots);
  /// This one's marks; knows, from the first time on, that the pass reaches it.
  SendMarks& join(const std::shared_ptr<SendNode>& send) TORCHSPAN_REQUIRES(marks_mutex_);
  /// No other sends are reached. False when that was known.
  bool seal();
  /// The sends that this worker's part waits for; until marks are final, those that marks may come for, too.
  std::vector<MessageInfo> waits_for(const engine::PassReport& graph) const;
  bool has_unmarked();
  void tell_marks();
  void note_unmarked(const std::vector<std::uint32_t>& ranks);
  void end_request();
  bool is_root() const { return is_root_.load(); }
  Error describe_failure();
  std::vector<std::string> calls_over(const torch::autograd::Node* node);
  void count_nodes();
  Future<void> tell_failure(const Error& failure);

  const std::weak_ptr<rpc::Endpoint> endpoint_;
  const std::weak_ptr<FutureHost> host_;
  const std::string name_;
  const std::uint32_t rank_;
  const std::shared_ptr<ContextState> context_;
  const PassKey key_;
  const std::shared_ptr<Outbox> outbox_;
  ContextSink sink_;
  StrayGradients stray_gradients_;
  engine::GraphPass graph_;
  const std::vector<std::shared_ptr<SendNode>> fast_sends_;  // FAST: all that the pass waits for
  const Sends sends_;                                        // SMART: those that marks may come for
  std::atomic<std::size_t> nodes_{~std::size_t{0}};          // unknown before it is prepared
  Promise<void> over_;
  std::atomic<bool> had_gradients_{false};
  std::atomic<bool> is_root_{false};
  std::atomic<bool> sealed_{false};
  std::atomic<std::uint64_t> sent_{0}, received_{0};

  // What the end waits for besides the graph: marks being told, gradients without an answer, disagreements.
  mutable Mutex end_mutex_;
  Stage stage_ TORCHSPAN_GUARDED_BY(end_mutex_) = Stage::kRunning;
  std::size_t inside_ TORCHSPAN_GUARDED_BY(end_mutex_) = 0;
  std::optional<Promise<void>> outsiders_left_ TORCHSPAN_GUARDED_BY(end_mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(end_mutex_);
  std::optional<Answer<PropagateGradients>> asker_ TORCHSPAN_GUARDED_BY(end_mutex_);
  Future<void> told_ TORCHSPAN_GUARDED_BY(end_mutex_);

  // SMART. An errand is a MarkSends of ours that has not been answered; while there is one, this worker is in
  // the middle of marking on behalf of `parent_` (the root: of nobody).
  mutable Mutex marks_mutex_;
  MarkWalk walk_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::map<std::uint64_t, SendMarks> marks_ TORCHSPAN_GUARDED_BY(marks_mutex_);  // of what is reached
  std::set<std::uint64_t> disagreements_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::size_t requests_ TORCHSPAN_GUARDED_BY(marks_mutex_) = 0;
  std::optional<Answer<MarkSends>> parent_ TORCHSPAN_GUARDED_BY(marks_mutex_);
  std::size_t marked_sends_ TORCHSPAN_GUARDED_BY(marks_mutex_) = 0;
  std::set<std::uint32_t> unmarked_workers_ TORCHSPAN_GUARDED_BY(marks_mutex_);
};

}  // namespace torchspan::autograd
