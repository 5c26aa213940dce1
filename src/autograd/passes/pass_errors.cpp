#include "autograd/passes/pass_errors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unordered_set>

namespace torchspan::autograd {
namespace {

constexpr std::size_t kMostNamed = 5;

/// Finds the nodes from which a node can be reached. Walks each other node once.
class PathSearch {
 public:
  explicit PathSearch(const torch::autograd::Node* node) : node_(node) {}
  bool is_reachable_from(const torch::autograd::Node& from) {
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

/// What to do about LibTorch's own errors in a distributed pass.
const char* advice(const std::string& text) {
  const auto contains = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (contains("second time"))
    return "; in a distributed pass, set BackwardOptions::retain_graph for the first backward()";
  if (contains("modified by an inplace operation"))
    return "; if several trainers step the same parameters, another trainer may have stepped them during "
           "this pass: set DistributedParamGroup::hogwild on all of them";
  if (contains("Final callbacks can only be installed"))
    return "; a distributed pass does not run them: construct DistributedDataParallel of torch without "
           "static_graph (with "
           "find_unused_parameters, if some are), and give other code that needs them a backward of LibTorch";
  return "";
}

std::vector<std::string> calls_over(const torch::autograd::Node* node,
                                    const std::vector<SendNodePtr>& sends) {
  std::vector<std::string> calls;
  if (const auto* receive = dynamic_cast<const RecvNode*>(node)) calls.push_back(receive->message().text());
  PathSearch search(node);
  for (auto send = sends.begin(); send != sends.end() && calls.size() < kMostNamed; ++send) {
    if (search.is_reachable_from(**send)) calls.push_back((*send)->message().text());
  }
  return calls;
}

}  // namespace

Error as_remote(const Error& failure, const std::string& worker) {
  const ErrorKind kind = failure.kind();
  const bool kept = kind == ErrorKind::kDisconnected || kind == ErrorKind::kTimedOut ||
                    kind == ErrorKind::kCancelled || kind == ErrorKind::kRemoteFailure;
  if (kept) return failure;
  Error remote(ErrorKind::kRemoteFailure, failure.message());
  remote.with_worker(failure.worker().empty() ? worker : failure.worker()).with_call(failure.call());
  for (const RemoteFrame& frame : failure.frames()) remote.with_frame(frame);
  if (failure.frames().empty())
    remote.with_frame({worker, "backward", "torchspan::Error", failure.message()});
  return remote;
}

Error located(const Error& cause, const std::string& worker) {
  if (cause.message().find(fmt::format("worker '{}'", worker)) != std::string::npos) return cause;
  Error placed(cause.kind(), fmt::format("{} [on worker '{}']", cause.message(), worker));
  placed.with_worker(cause.worker().empty() ? worker : cause.worker()).with_call(cause.call());
  for (const RemoteFrame& frame : cause.frames()) placed.with_frame(frame);
  return placed;
}

Error node_failure(const engine::GraphPass& graph, const std::string& worker,
                   const std::vector<SendNodePtr>& sends) {
  const Error cause = to_error(graph.error());
  const auto node = graph.failed_at();
  if (!node) return cause;
  std::string place = fmt::format("on worker '{}'", worker);
  const auto calls = calls_over(node.get(), sends);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    place += fmt::format("{} {}", i == 0 ? ", in the graph of" : " and", calls[i]);
  }
  Error failure(cause.kind(), fmt::format("{} [{}]{}", cause.message(), place, advice(cause.message())));
  failure.with_worker(cause.worker()).with_call(cause.call());
  for (const RemoteFrame& frame : cause.frames()) failure.with_frame(frame);
  const ExceptionDescription description =
      graph.cause() ? describe(graph.cause()) : ExceptionDescription{"torchspan::Error", cause.message()};
  return failure.with_frame({worker, graph.failed_node(), description.type, description.text});
}

Error departed_worker_failure(const std::string& lost, std::uint32_t rank, const Error& cause,
                              const std::string& worker, const std::string& through,
                              std::set<std::string> calls) {
  const ErrorKind kind = cause.kind();
  if (kind != ErrorKind::kDisconnected && kind != ErrorKind::kCancelled && kind != ErrorKind::kTimedOut) {
    const std::string what = through.empty() ? "a message" : "the gradients of " + through;
    return Error(kind, fmt::format("the backward pass failed: worker '{}' could not send {} to worker '{}' "
                                   "(rank {}): {}",
                                   worker, what, lost, rank, cause.message()));
  }
  if (!through.empty()) calls.insert(through);
  Error failure(
      kind,
      fmt::format("the backward pass failed: worker '{}' lost worker '{}' (rank {}): {}{}", worker, lost,
                  rank, cause.message(),
                  calls.empty() ? "" : fmt::format("; messages between them: {}", fmt::join(calls, ", "))));
  return failure.with_worker(lost);
}

}  // namespace torchspan::autograd
