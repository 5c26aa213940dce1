#include "autograd/passes/pass_state.h"

#include <memory>
#include <utility>

#include "autograd/contexts/current_contexts.h"
#include "autograd/extension_impl.h"
#include "autograd/passes/pass_errors.h"
#include "core/api/throw_invalid.h"

namespace torchspan::autograd {

namespace {

/// Counts a message of gradients as on its way to the graph.
class Delivering {
 public:
  explicit Delivering(std::atomic<int>& count) : count_(count) { ++count_; }
  ~Delivering() { --count_; }
  Delivering(const Delivering&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

PassState::PassState(const Worker& worker, std::shared_ptr<ContextState> context, PassKey key)
    : worker_(worker),
      rank_(static_cast<std::uint32_t>(worker.rank())),
      context_(std::move(context)),
      key_(key),
      outbox_(std::make_shared<Outbox>(worker.backend())),
      graph_(context_, key_, hooks()),
      marks_(context_->id(), rank_, graph_),
      ending_(*this) {}

/// They run while a thread drives this pass, which keeps it alive.
PassGraph::Hooks PassState::hooks() {
  PassGraph::Hooks hooks;
  hooks.enlist = [this](UniqueFunction<void()> help) {
    post([this, help = std::move(help)]() mutable {
      const WorkScope scope(context_, this);
      help();
    });
  };
  hooks.failed = [this] { ending_.fail_in_node(); };
  return hooks;
}

void PassState::prepare(const std::vector<at::Tensor>& roots) {
  const bool is_root = !roots.empty();
  if (is_root) {
    marks_.set_root();
    had_gradients_ = true;  // no other worker waits for the root's part
  }
  graph_.add_roots(roots);
  ending_.watch_graph();
  graph_.prepare();
  if (is_root && key_.mode == PassMode::kSmart) begin_marks(roots);
}

void PassState::receive(PropagateGradients message, std::uint32_t peer) {
  const auto send = graph_.find_send(message.message, peer);
  const Delivering delivering(delivering_);
  ++received_;
  engine::Delivery delivery;
  if (key_.mode == PassMode::kFast) {
    for (const at::Tensor& gradient : message.gradients) delivery.reached.push_back(gradient.defined());
  } else {
    if (message.reached.size() != message.gradients.size())
      throw_invalid("a gradient message does not say for each gradient whether it is reached");
    delivery.reached.assign(message.reached.begin(), message.reached.end());
    deliver_to_marks(send, message.reached);
  }
  send->place(message.gradients, context_->copies());
  delivery.gradients = std::move(message.gradients);
  graph_.deliver(*send, std::move(delivery));
}

/// Gradients may arrive before their marks. The pass then stays open on this worker until the marks arrive,
/// because only marks are passed on to other workers.
void PassState::deliver_to_marks(const SendNodePtr& send, const std::vector<std::uint8_t>& reached) {
  ending_.enter();
  const SmartMarks::Delivered delivered = marks_.deliver(send, reached);
  if (!delivered.disagrees) ending_.leave();
  if (delivered.twice) {
    throw_invalid("the gradients of {} arrived twice in one pass", send->message().text());
  }
}

void PassState::drive() {
  const WorkScope scope(context_, this);
  graph_.run();
}

void PassState::send_back(const RecvNode& node, torch::autograd::variable_list gradients) {
  node.check_context(context_->id());
  PropagateGradients message{context_->id(),       id(), node.message().id, key_.retain_graph, key_.threads,
                             std::move(gradients), {}};
  if (key_.mode == PassMode::kSmart) message.reached = marks_.reached(node, message.gradients.size());
  message.place = node.gradient_place();
  const std::uint32_t to = node.message().peer;
  ending_.enter();
  ++sent_;
  outbox_->ask(
      to, std::move(message),
      [this, weak = weak_from_this(), to, call = node.message()](PartOver over, std::exception_ptr error) {
        auto alive = weak.lock();
        if (!alive) return;
        if (error) {
          post([this, to, error, call] { ending_.fail_without(to, to_error(error), call.text()); });
        } else if (over.failure) {
          post([this, failure = *over.failure] { ending_.fail(failure); });
        } else {
          ending_.leave();
        }
        release_on_pool(std::move(alive));
      });
}

void PassState::finish() {
  const std::vector<at::Tensor> parameters = stray_gradients().parameters();
  const auto backend = worker_.backend();
  if (!parameters.empty() && backend)
    Worker(backend).extension<AutogradExtension>().impl()->stray_gradient_warning().write(parameters);
  if (key_.retain_graph) return;
  std::vector<SendNodePtr> gone = graph_.use_up(marks_.marked_sends());
  if (!gone.empty()) post([gone = std::move(gone)] {});  // this may be the receiving thread
}

void PassState::post(UniqueFunction<void()> act) {
  const auto continuations = worker_.continuations().lock();
  if (!continuations) return act();
  continuations->post([self = shared_from_this(), act = std::move(act)]() mutable { act(); });
}

void PassState::release_on_pool(std::shared_ptr<PassState> pass) {
  // Without this reference, the pass that has it may be destroyed meanwhile.
  const auto context = pass->context_;
  if (context->drop_running(pass)) return;
  const auto continuations = pass->worker_.continuations().lock();
  if (continuations) continuations->post([last = std::move(pass)] {});
}

PartReport PassState::report() const {
  // In this order: the graph is busy with a message that is counted here, or the message is seen on its way to it.
  const std::uint64_t received = received_;
  const bool delivering = delivering_ > 0;
  const engine::PassReport graph = graph_.report();
  PartReport mine{worker_.name(), false, delivering || graph.busy, graph.executed, sent_,
                  received,       {},    outbox_->waiting()};
  const Worker me = worker_.require();
  for (const MessageInfo& message : waits_for(graph)) {
    mine.waiting.push_back({message.id, message.call, message.site, message.reply,
                            me.backend()->name_of(message.peer),
                            context_->sends().is_unanswered(message.id)});
  }
  return mine;
}

/// The sends that this worker's part waits for: until all marks are made, also those that may be marked.
std::vector<MessageInfo> PassState::waits_for(const engine::PassReport& graph) const {
  std::vector<MessageInfo> messages;
  for (auto* node : graph.waiting_for) {
    if (const auto* send = dynamic_cast<SendNode*>(node)) messages.push_back(send->message());
  }
  if (graph_.is_sealed() || key_.mode == PassMode::kFast) return messages;
  for (MessageInfo& message : marks_.unreached(graph_.messages())) messages.push_back(std::move(message));
  return messages;
}

void PassState::begin_marks(const std::vector<at::Tensor>& roots) {
  ending_.enter();  // the pass must not end while this thread sends its marks, even if all gradients are back
  marks_.begin(roots);
  send_marks();
  end_marks_request();
  ending_.leave();
}

/// enter() keeps the pass open while this thread sends marks: gradients that agree with them may end it.
void PassState::mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer) {
  ending_.enter();
  take_marks(find_marked(sends, peer), answer);  // an exception fails the pass, which needs no leave()
}

bool PassState::try_mark(const std::vector<MarkedSend>& sends, std::uint32_t peer,
                         Answer<MarkSends>& answer) {
  SmartMarks::Marks marks;
  try {
    marks = find_marked(sends, peer);
    ending_.enter();
  } catch (const Error&) {
    return false;
  }
  try {
    take_marks(marks, answer);
  } catch (...) {  // the pass has failed meanwhile
    const Error error = to_error(std::current_exception());
    if (answer) answer.give(MarkedWorkers{{}, as_remote(error, worker_.name())});
    post([this, error] { ending_.fail_here(error); });
  }
  return true;
}

SmartMarks::Marks PassState::find_marked(const std::vector<MarkedSend>& sends, std::uint32_t peer) const {
  SmartMarks::Marks marks;
  for (const MarkedSend& marked : sends) {
    auto send = graph_.find_send(marked.message, peer);
    for (const std::uint32_t output : marked.outputs) {
      if (output >= send->num_outputs()) throw_invalid("a mark names a tensor that is not in its message");
    }
    marks.emplace_back(std::move(send), marked);
  }
  return marks;
}

/// Answers at once unless these marks begin a round of marking, which is answered at its end. Leaves the pass.
void PassState::take_marks(const SmartMarks::Marks& marks, Answer<MarkSends>& answer) {
  SmartMarks::Marked marked = marks_.mark(marks, answer);
  if (marked.sealed) drive_soon();
  send_marks();
  end_marks_request();
  for (; marked.settled > 0; --marked.settled) ending_.leave();
  ending_.leave();
  if (answer) answer.give(marks_.has_unmarked() ? MarkedWorkers{{rank_}, {}} : MarkedWorkers{});
}

/// Marks the sends, on other workers, that the walk has reached.
void PassState::send_marks() {
  for (auto& [rank, sends] : marks_.take_unsent()) {
    MarkSends message{context_->id(), key_.id, key_.retain_graph, key_.threads, std::move(sends)};
    ending_.enter();
    outbox_->ask(rank, std::move(message),
                 [this, weak = weak_from_this(), to = rank](MarkedWorkers marked, std::exception_ptr error) {
                   auto alive = weak.lock();
                   if (!alive) return;
                   take_marks_answer(std::move(marked), error, to);
                   release_on_pool(std::move(alive));
                 });
  }
}

void PassState::take_marks_answer(MarkedWorkers marked, const std::exception_ptr& error, std::uint32_t from) {
  if (error) return post([this, error, from] { ending_.fail_without(from, to_error(error)); });
  if (marked.failure) return post([this, failure = *marked.failure] { ending_.fail(failure); });
  marks_.add_unmarked_workers(marked.ranks);
  end_marks_request();
  ending_.leave();
}

/// The last request ends the round: the worker whose marks began it gets its answer; on the root, all marks
/// are final.
void PassState::end_marks_request() {
  std::optional<SmartMarks::Round> round = marks_.end_request();
  if (!round) return;
  if (!marks_.is_root()) {
    if (round->parent) round->parent->give(MarkedWorkers{std::move(round->unmarked_workers), {}});
    return;
  }
  if (const auto backend = worker_.backend()) {
    for (const std::uint32_t rank : round->unmarked_workers) {
      if (rank == rank_) continue;
      const MarksFinal message{context_->id(), key_.id};
      static_cast<void>(std::make_shared<Notification<MarksFinal>>(Worker(backend), rank, message)->start());
    }
  }
  marks_are_final();
}

void PassState::marks_are_final() {
  if (graph_.seal()) drive_soon();
}

/// Another thread runs the nodes that became ready.
void PassState::drive_soon() {
  post([this] { drive(); });
}

PassEnding::PassEnding(PassState& pass) : pass_(pass), over_(pass.worker_.continuations()) {}

void PassEnding::watch_graph() {
  const auto pass = pass_.shared_from_this();
  ContextSink& sink = pass_.graph_.sink();
  sink.after_work([this, pass](const engine::PassStatus& status) { work_over(status); });
  sink.end()->last([this, pass](const engine::PassStatus& status) { end(status); });
}

void PassEnding::enter() {
  MutexLock lock(mutex_);
  if (stage_ == Stage::kFailed) throw Error(*failure_);
  if (stage_ == Stage::kOver)
    throw Error(ErrorKind::kCancelled, "this backward pass has ended on this worker");
  ++inside_;
}

void PassEnding::leave() {
  std::optional<Promise<void>> left;
  {
    MutexLock lock(mutex_);
    if (--inside_ > 0 || stage_ != Stage::kGraphDone) return;
    stage_ = Stage::kOver;
    left = std::exchange(all_left_, std::nullopt);
  }
  if (!left) return;
  // This may be the thread that delivers replies, which must not run callbacks of the program.
  if (!pass_.graph_.sink().end()->is_watched()) {
    left->set_value();
    return;
  }
  pass_.post([promise = std::make_shared<Promise<void>>(std::move(*left))] { promise->set_value(); });
}

void PassEnding::cancel() {
  pass_.post([this] { fail_here(Error(ErrorKind::kCancelled, "the program cancelled this backward pass")); });
}

/// The graph's work is over. The sink delays the end until all that entered have left.
void PassEnding::work_over(const engine::PassStatus& status) {
  if (status.error) return fail_in_node();
  Future<void> rest;
  {
    MutexLock lock(mutex_);
    if (stage_ != Stage::kRunning) return;
    if (inside_ == 0) {
      stage_ = Stage::kOver;
      return;
    }
    stage_ = Stage::kGraphDone;
    // Without an executor: the end runs on the thread that delivers the last reply.
    all_left_.emplace(std::weak_ptr<ContinuationExecutor>());
    rest = all_left_->future();
  }
  pass_.graph_.sink().hold(std::move(rest));
}

void PassEnding::end(const engine::PassStatus& status) {
  if (status.error) return fail_here(to_error(status.error));  // of a future that the sink held
  std::optional<Answer<PropagateGradients>> answer;
  {
    MutexLock lock(mutex_);
    if (stage_ == Stage::kFailed) return;
    stage_ = Stage::kEnded;
    answer = std::exchange(answer_, std::nullopt);
  }
  pass_.finish();
  leave_context(std::nullopt);
  if (answer) answer->give(PartOver{});
  over_.set_value();
}

void PassEnding::answer_when_over(Answer<PropagateGradients> answer) {
  PartOver over;
  {
    MutexLock lock(mutex_);
    if (stage_ == Stage::kFailed) {
      over.failure = as_remote(*failure_, pass_.worker_.name());
    } else if (stage_ != Stage::kEnded) {
      answer_.emplace(std::move(answer));
      return;
    }
  }
  answer.give(over);
}

void PassEnding::fail(const Error& failure, Close where) {
  const auto pass = pass_.shared_from_this();  // the context drops its reference
  std::optional<Promise<void>> left;
  std::optional<Answer<PropagateGradients>> answer;
  {
    MutexLock lock(mutex_);
    if (stage_ == Stage::kFailed || stage_ == Stage::kEnded) return;
    stage_ = Stage::kFailed;
    failure_ = failure;
    left = std::exchange(all_left_, std::nullopt);
    answer = std::exchange(answer_, std::nullopt);
  }
  const auto all_notified = std::make_shared<Promise<void>>(pass_.worker_.continuations());
  leave_context(failure, all_notified->future());
  const Future<void> others = notify_others(failure);
  others.add_done_callback([all_notified](const Future<void>&) { all_notified->set_value(); });
  Future<void> notified = when_all<void>({others, pass_.graph_.sink().takers_done()});
  {
    MutexLock lock(mutex_);
    notified_ = std::move(notified);
  }
  const Error remote = as_remote(failure, pass_.worker_.name());
  if (auto parent = pass_.marks_.take_parent()) parent->give(MarkedWorkers{{}, remote});
  if (answer) answer->give(PartOver{remote});
  if (where == Close::kHere) return close(failure, std::move(left));
  pass_.post([this, failure, left = std::move(left)]() mutable { close(failure, std::move(left)); });
}

void PassEnding::close(const Error& failure, std::optional<Promise<void>> left) {
  if (left) left->set_error(failure);
  pass_.outbox_->close();
  pass_.graph_.abort(failure);
  over_.set_error(failure);  // after the callbacks of the pass's end, unless a thread is still in a node
}

void PassEnding::fail_here(const Error& cause, Close close) {
  fail(located(cause, pass_.worker_.name()), close);
}

void PassEnding::fail_in_node() {
  fail(pass_.graph_.failure(pass_.worker_.name(), pass_.marks_.reached_sends()));
}

void PassEnding::fail_without(std::uint32_t rank, const Error& cause, const std::string& through,
                              Close close) {
  const auto backend = pass_.worker_.backend();
  if (!backend || backend->is_stopping())
    return fail_here(Error(ErrorKind::kCancelled, "this worker was shut down during a backward pass"), close);
  fail(departed_worker_failure(backend->name_of(rank), rank, cause, pass_.worker_.name(), through,
                               pass_.context_->sends().calls_to(rank)),
       close);
}

void PassEnding::leave_context(const std::optional<Error>& failure, Future<void> notified) {
  if (const auto backend = pass_.worker_.backend())
    backend->runtime().metrics.counter("autograd.counted_nodes").add(pass_.graph_.counted_nodes());
  pass_.context_->end_pass(pass_.key_.id, pass_.work(), failure, std::move(notified));
}

Future<void> PassEnding::notify_others(const Error& failure) {
  const auto backend = pass_.worker_.backend();
  if (!backend) return make_ready_future<void>();
  return notify_all(Worker(backend), *pass_.context_,
                    AbortPass{pass_.context_->id(), pass_.key_.id, as_remote(failure, pass_.worker_.name())});
}

std::optional<Error> PassEnding::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

Future<void> PassEnding::notified() const {
  MutexLock lock(mutex_);
  return notified_.valid() ? notified_ : make_ready_future<void>();
}

}  // namespace torchspan::autograd
