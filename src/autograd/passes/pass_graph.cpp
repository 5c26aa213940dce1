#include "autograd/passes/pass_graph.h"

#include <algorithm>
#include <fmt/format.h>

#include "autograd/passes/pass_errors.h"

namespace torchspan::autograd {
namespace {

engine::PassOptions engine_options(const ContextState& context, const PassKey& key, PassGraph::Hooks hooks) {
  engine::PassOptions options;
  options.thread_state = StrayGradients::watched_state();
  options.retain_graph = key.retain_graph;
  options.threads = std::clamp<std::uint32_t>(key.threads, 1, PassKey::kMostThreads);
  options.enlist = std::move(hooks.enlist);
  options.failed = std::move(hooks.failed);
  if (key.mode == PassMode::kSmart) options.counts = context.sends().edges();
  options.events = context.copies().events();
  return options;
}

}  // namespace

PassGraph::PassGraph(std::shared_ptr<ContextState> context, const PassKey& key, Hooks hooks)
    : context_(std::move(context)),
      mode_(key.mode),
      sink_(*context_, key.id),
      graph_(sink_, engine_options(*context_, key, std::move(hooks))),
      fast_sends_(mode_ == PassMode::kFast ? context_->sends().unused() : std::vector<SendNodePtr>()),
      sends_(mode_ == PassMode::kFast ? PassSends() : context_->sends().count()) {}

void PassGraph::add_roots(const std::vector<at::Tensor>& roots) {
  for (const at::Tensor& root : roots) graph_.add_root(root);
  for (const auto& send : fast_sends_) graph_.add_pending(send);
}

void PassGraph::prepare() {
  graph_.prepare();
  nodes_ = report().nodes + context_->sends().edges()->size();
  if (sends_.count == 0) seal();
}

bool PassGraph::seal() {
  sealed_ = true;
  return graph_.seal();
}

SendNodePtr PassGraph::find_send(std::uint64_t message, std::uint32_t peer) const {
  const ContextSends& sends = context_->sends();
  auto send = mode_ == PassMode::kFast ? sends.find(message) : sends.find(message, sends_.end);
  if (send->message().peer == peer) return send;
  throw Error(ErrorKind::kInvalid, fmt::format("a gradient or mark for {} came from a worker that it was not "
                                               "sent to",
                                               send->message().text()));
}

void PassGraph::run() {
  if (const void* outer = StrayGradients::engine_pass()) stray_gradients_.begin_inside(outer);
  graph_.run();
}

std::vector<SendNodePtr> PassGraph::use_up(const std::vector<SendNodePtr>& marked) {
  std::vector<SendNodePtr> gone;
  for (const auto& send : fast_sends_) context_->sends().use_up(*send);  // every FAST pass needs all sends
  for (const auto& send : marked) {
    if (SendNodePtr removed = context_->sends().use(*send)) gone.push_back(std::move(removed));
  }
  return gone;
}

Error PassGraph::failure(const std::string& worker, std::vector<SendNodePtr> reached) const {
  std::vector<SendNodePtr> sends = fast_sends_;
  sends.insert(sends.end(), std::make_move_iterator(reached.begin()), std::make_move_iterator(reached.end()));
  return node_failure(graph_, worker, sends);
}

}  // namespace torchspan::autograd
