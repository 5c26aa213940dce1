// How a worker's part of a pass ends: when its graph is done and all that it waits for has come; or at once,
// by the first failure.
#include <algorithm>
#include <fmt/format.h>
#include <unordered_set>

#include "autograd/protocol.h"
#include "autograd/telling.h"

namespace torchspan::autograd {
namespace {

/// Searches for one node from several others. What leads nowhere is walked once.
class Search {
 public:
  explicit Search(const torch::autograd::Node* node) : node_(node) {}
  bool leads_there(const torch::autograd::Node& from) {
    std::vector<const torch::autograd::Node*> ahead{&from}, walked;
    while (!ahead.empty()) {
      const auto* at = ahead.back();
      ahead.pop_back();
      if (at == node_) {
        for (const auto* node : walked) seen_.erase(node);
        return true;
      }
      if (!seen_.insert(at).second) continue;
      walked.push_back(at);
      for (const auto& edge : at->next_edges()) {
        if (edge.function) ahead.push_back(edge.function.get());
      }
    }
    return false;
  }

 private:
  const torch::autograd::Node* const node_;
  std::unordered_set<const torch::autograd::Node*> seen_;
};

/// What LibTorch's own errors cannot know.
const char* advice(const std::string& text) {
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (says("second time"))
    return "; in a distributed pass that is BackwardOptions::retain_graph of the first backward()";
  if (says("modified by an inplace operation"))
    return "; if several trainers step the same parameters, that was another one's step: all of them say "
           "TargetGroup::hogwild then";
  return "";
}

}  // namespace

/// What was invalid here is, there, what failed elsewhere.
Error as_told(const Error& failure, const std::string& worker) {
  const ErrorKind kind = failure.kind();
  const bool kept = kind == ErrorKind::kDisconnected || kind == ErrorKind::kTimedOut ||
                    kind == ErrorKind::kCancelled || kind == ErrorKind::kRemoteFailure;
  if (kept) return failure;
  Error told(ErrorKind::kRemoteFailure, failure.message());
  told.with_worker(failure.worker().empty() ? worker : failure.worker()).with_call(failure.call());
  for (const RemoteFrame& frame : failure.frames()) told.with_frame(frame);
  if (failure.frames().empty()) told.with_frame({worker, "backward", "torchspan::Error", failure.message()});
  return told;
}

Error located(const Error& cause, const std::string& worker) {
  if (cause.message().find(fmt::format("worker '{}'", worker)) != std::string::npos) return cause;
  Error placed(cause.kind(), fmt::format("{} [on worker '{}']", cause.message(), worker));
  placed.with_worker(cause.worker().empty() ? worker : cause.worker()).with_call(cause.call());
  for (const RemoteFrame& frame : cause.frames()) placed.with_frame(frame);
  return placed;
}

void PassState::enter() {
  MutexLock lock(end_mutex_);
  if (stage_ == Stage::kFailed) throw Error(*failure_);
  if (stage_ == Stage::kOver) throw Error(ErrorKind::kCancelled, "this backward pass is over on this worker");
  ++inside_;
}

void PassState::leave() {
  std::optional<Promise<void>> left;
  {
    MutexLock lock(end_mutex_);
    if (--inside_ > 0 || stage_ != Stage::kGraphDone) return;
    stage_ = Stage::kOver;
    left = std::exchange(outsiders_left_, std::nullopt);
  }
  if (!left) return;
  // Others' callbacks are not for the thread that brings a reply, which may be the one that is here.
  if (!sink_.end()->is_watched()) {
    left->set_value();
    return;
  }
  post([promise = std::make_shared<Promise<void>>(std::move(*left))](PassState&) { promise->set_value(); });
}

void PassState::let_go(std::shared_ptr<PassState> pass) {
  {
    MutexLock lock(pass->end_mutex_);
    if (pass->stage_ != Stage::kEnded && pass->stage_ != Stage::kFailed) return;  // its context has it
  }
  const auto host = pass->host_.lock();
  if (host) host->post([last = std::move(pass)] {});
}

void PassState::post(UniqueFunction<void(PassState&)> act) {
  const auto host = host_.lock();
  if (!host) return act(*this);
  host->post([self = shared_from_this(), act = std::move(act)]() mutable { act(*self); });
}

void PassState::cancel() {
  post([](PassState& pass) {
    pass.fail_here(Error(ErrorKind::kCancelled, "the program cancelled this backward pass"));
  });
}

/// The graph's work is over; holds the end until everybody inside has left.
void PassState::work_over(const engine::PassStatus& status) {
  if (status.error) return fail(describe_failure());
  Future<void> rest;
  {
    MutexLock lock(end_mutex_);
    if (stage_ != Stage::kRunning) return;
    if (inside_ == 0) {
      stage_ = Stage::kOver;
      return;
    }
    stage_ = Stage::kGraphDone;
    // Without a host: the end comes on the thread that brings the last reply.
    outsiders_left_.emplace(std::weak_ptr<FutureHost>());
    rest = outsiders_left_->future();
  }
  sink_.hold(std::move(rest));
}

void PassState::end(const engine::PassStatus& status) {
  if (status.error) return fail_here(to_error(status.error));  // what others held the end for failed
  std::optional<Answer<PropagateGradients>> asker;
  {
    MutexLock lock(end_mutex_);
    if (stage_ == Stage::kFailed) return;
    stage_ = Stage::kEnded;
    asker = std::exchange(asker_, std::nullopt);
  }
  report_stray_gradients();
  if (!key_.retain_graph) use_up_sends();
  count_nodes();
  context_->end_pass(id(), work(), std::nullopt);
  if (asker) asker->give(PartOver{});
  over_.set_value();
}

void PassState::report_stray_gradients() {
  const std::vector<at::Tensor> parameters = stray_gradients_.parameters();
  const auto endpoint = endpoint_.lock();
  if (!parameters.empty() && endpoint)
    Worker(endpoint).extension<AutogradExtension>().impl()->warn_of_stray_gradients(parameters);
}

void PassState::tell_part_over(Answer<PropagateGradients> answer) {
  PartOver over;
  {
    MutexLock lock(end_mutex_);
    if (stage_ == Stage::kFailed) {
      over.failure = as_told(*failure_, name_);
    } else if (stage_ != Stage::kEnded) {
      asker_.emplace(std::move(answer));
      return;
    }
  }
  answer.give(over);
}

void PassState::fail(const Error& failure, Close where) {
  const auto self = shared_from_this();  // the context lets go of it
  std::optional<Promise<void>> left;
  std::optional<Answer<PropagateGradients>> asker;
  {
    MutexLock lock(end_mutex_);
    if (stage_ == Stage::kFailed || stage_ == Stage::kEnded) return;
    stage_ = Stage::kFailed;
    failure_ = failure;
    left = std::exchange(outsiders_left_, std::nullopt);
    asker = std::exchange(asker_, std::nullopt);
  }
  count_nodes();
  context_->end_pass(id(), work(), failure);
  Future<void> told = when_all<void>({tell_failure(failure), sink_.takers_done()});
  std::optional<Answer<MarkSends>> parent;
  {
    MutexLock lock(end_mutex_);
    told_ = std::move(told);
  }
  {
    MutexLock lock(marks_mutex_);
    parent = std::exchange(parent_, std::nullopt);
  }
  if (parent) parent->give(MarkedWorkers{{}, as_told(failure, name_)});
  if (asker) asker->give(PartOver{as_told(failure, name_)});
  if (where == Close::kHere) return close(failure, std::move(left));
  post([failure, left = std::move(left)](PassState& pass) mutable { pass.close(failure, std::move(left)); });
}

void PassState::close(const Error& failure, std::optional<Promise<void>> left) {
  if (left) left->set_error(failure);
  outbox_->close();
  graph_.abort(failure);
  over_.set_error(failure);  // after the callbacks of the pass's end, unless a thread is still in a node
}

void PassState::fail_here(const Error& cause, Close close) { fail(located(cause, name_), close); }

void PassState::fail_without(std::uint32_t rank, const Error& cause, const std::string& through,
                             Close close) {
  const auto endpoint = endpoint_.lock();
  if (!endpoint || endpoint->is_stopping())
    return fail_here(Error(ErrorKind::kCancelled, "this worker was shut down during a backward pass"), close);
  const std::string name = endpoint->name_of(rank);
  const ErrorKind kind = cause.kind();
  if (kind != ErrorKind::kDisconnected && kind != ErrorKind::kCancelled && kind != ErrorKind::kTimedOut) {
    const std::string what = through.empty() ? "a message" : "the gradients of " + through;
    return fail_here(
        Error(kind,
              fmt::format("the backward pass cannot go on: {} could not be given to worker '{}' (rank {}), "
                          "says worker '{}': {}",
                          what, name, rank, name_, cause.message())),
        close);
  }
  std::set<std::string> calls = context_->calls_to(rank);
  if (!through.empty()) calls.insert(through);
  std::string list;
  for (const std::string& call : calls) list += (list.empty() ? "" : ", ") + call;
  Error failure(kind, fmt::format("the backward pass lost worker '{}' (rank {}), says worker '{}': {}{}",
                                  name, rank, name_, cause.message(),
                                  list.empty() ? "" : fmt::format("; between them travelled {}", list)));
  fail(failure.with_worker(name), close);
}

/// The graph failed in a node: names the node, this worker, and the calls whose results it belongs to.
Error PassState::describe_failure() {
  const Error cause = to_error(graph_.error());
  const auto node = graph_.failed_at();
  if (!node) return cause;
  std::string place = fmt::format("on worker '{}'", name_);
  const auto calls = calls_over(node.get());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    place += fmt::format("{} {}", i == 0 ? ", behind" : " and", calls[i]);
  }
  Error failure(cause.kind(), fmt::format("{} [{}]{}", cause.message(), place, advice(cause.message())));
  failure.with_worker(cause.worker()).with_call(cause.call());
  for (const RemoteFrame& frame : cause.frames()) failure.with_frame(frame);
  const ExceptionStory story =
      graph_.cause() ? describe(graph_.cause()) : ExceptionStory{"torchspan::Error", cause.message()};
  return failure.with_frame({name_, graph_.failed_node(), story.type, story.text});
}

std::vector<std::string> PassState::calls_over(const torch::autograd::Node* node) {
  std::vector<std::string> calls;
  std::vector<std::shared_ptr<SendNode>> sends = fast_sends_;
  {
    MutexLock lock(marks_mutex_);
    for (const auto& [message, marks] : marks_) sends.push_back(marks.send());
  }
  if (const auto* receive = dynamic_cast<const RecvNode*>(node)) calls.push_back(receive->message().text());
  Search search(node);
  for (auto send = sends.begin(); send != sends.end() && calls.size() < kMostNamed; ++send) {
    if (search.leads_there(**send)) calls.push_back((*send)->message().text());
  }
  return calls;
}

Future<void> PassState::tell_failure(const Error& failure) {
  const auto endpoint = endpoint_.lock();
  if (!endpoint) return make_ready_future<void>();
  return tell_all(Worker(endpoint), *context_, AbortPass{context_->id(), id(), as_told(failure, name_)});
}

std::optional<Error> PassState::failure() const {
  MutexLock lock(end_mutex_);
  return failure_;
}

Future<void> PassState::told() const {
  MutexLock lock(end_mutex_);
  return told_.valid() ? told_ : make_ready_future<void>();
}

}  // namespace torchspan::autograd
