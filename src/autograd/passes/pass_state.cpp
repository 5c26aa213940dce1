#include "autograd/passes/pass_state.h"

#include <fmt/format.h>

#include "autograd/contexts/current_contexts.h"
#include "autograd/extension_impl.h"

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
    : PassOwner(worker.endpoint()->host()),
      worker_(worker),
      rank_(static_cast<std::uint32_t>(worker.rank())),
      context_(std::move(context)),
      key_(key),
      outbox_(std::make_shared<Outbox>(worker.endpoint())),
      graph_(context_, key_, hooks()),
      marks_(context_->id(), rank_, graph_),
      ending_(parts()),
      marking_(parts(), ending_) {}

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

PassParts PassState::parts() { return {*this, worker_, rank_, *context_, key_, *outbox_, graph_, marks_}; }

void PassState::prepare(const std::vector<at::Tensor>& roots) {
  const bool is_root = !roots.empty();
  if (is_root) {
    marks_.set_root();
    had_gradients_ = true;  // no other worker waits for the root's part
  }
  graph_.add_roots(roots);
  ending_.watch_graph();
  graph_.prepare();
  if (is_root && key_.mode == PassMode::kSmart) marking_.begin(roots);
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
      throw Error(ErrorKind::kInvalid,
                  "a gradient message does not say for each gradient whether it is reached");
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
    throw Error(ErrorKind::kInvalid,
                fmt::format("the gradients of {} arrived twice in one pass", send->message().text()));
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
  const auto endpoint = worker_.endpoint();
  if (!parameters.empty() && endpoint)
    Worker(endpoint).extension<AutogradExtension>().impl()->stray_gradient_warning().write(parameters);
  if (key_.retain_graph) return;
  std::vector<SendNodePtr> gone = graph_.use_up(marks_.marked_sends());
  if (!gone.empty()) post([gone = std::move(gone)] {});  // this may be the receiving thread
}

bool PassState::leave_to_context(std::shared_ptr<PassOwner>& pass) const {
  const auto context = context_;  // without the reference, another thread may destroy this object
  return context->drop_running(pass);
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
                            me.endpoint()->name_of(message.peer),
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

}  // namespace torchspan::autograd
