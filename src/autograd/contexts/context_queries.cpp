#include "autograd/contexts/context_queries.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/autograd.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/rpc/worker.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"
#include "autograd/passes/pass_state.h"
#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"

namespace torchspan::autograd {
namespace {

using torch::autograd::Node;

/// Follows the edges up to the messages that this worker received, and counts the nodes.
void follow(const torch::autograd::edge_list& edges, GraphPart& part) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> ahead;
  std::set<std::uint64_t> sources;
  const auto look = [&](const torch::autograd::edge_list& list) {
    for (const auto& edge : list) {
      if (edge.function && seen.insert(edge.function.get()).second) ahead.push_back(edge.function.get());
    }
  };
  look(edges);
  while (!ahead.empty()) {
    const Node* node = ahead.back();
    ahead.pop_back();
    if (const auto* receive = dynamic_cast<const RecvNode*>(node)) {
      sources.insert(receive->message().id);
      continue;
    }
    ++part.nodes;
    if (dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr) ++part.parameters;
    look(node->next_edges());
  }
  part.sources.assign(sources.begin(), sources.end());
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (c == '\n') {
      result += "\\n";
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string contents(const GraphPart& part) {
  const auto count = [](std::uint64_t n, const char* what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
  };
  return count(part.nodes, "node") +
         (part.parameters == 0 ? std::string() : ", " + count(part.parameters, "parameter"));
}

std::string label_of(const GraphPart& part) {
  return fmt::format("{}\n{}", part.call, part.reply ? "result" : "arguments") +
         (part.site.empty() ? std::string() : "\n" + part.site);
}

void write_worker(const WorkerGraph& worker, const std::map<std::uint64_t, std::uint32_t>& receivers,
                  std::string& dot) {
  dot += fmt::format("  subgraph \"cluster_{}\" {{\n    label={};\n    style=rounded;\n", worker.rank,
                     quoted(worker.worker + (worker.silent ? "\n(did not answer)" : "")));
  for (const auto& [message, rank] : receivers) {
    if (rank == worker.rank) dot += fmt::format("    \"recv_{:x}\" [label=\"recv\"];\n", message);
  }
  for (std::size_t i = 0; i < worker.parts.size(); ++i) {
    const GraphPart& part = worker.parts[i];
    const std::string name = part.message == 0 ? fmt::format("loss_{}_{}", worker.rank, i)
                                               : fmt::format("send_{:x}", part.message);
    dot += fmt::format("    \"{}\" [label={}, shape={}];\n", name,
                       quoted((part.message == 0 ? "loss\n" : "send\n") + contents(part)),
                       part.message == 0 ? "doublecircle" : "box");
    for (const std::uint64_t source : part.sources) {
      dot += fmt::format("    \"recv_{:x}\" -> \"{}\";\n", source, name);
    }
  }
  dot += "  }\n";
}

}  // namespace

/// This worker's part of a context's graph, with the graphs of `roots`, losses on this worker.
WorkerGraph graph_of(const Worker& me, const ContextState& context, const std::vector<at::Tensor>& roots) {
  WorkerGraph graph{me.name(), me.backend()->self().rank, false, {}};
  for (const auto& send : context.sends().all()) {
    const MessageInfo& message = send->message();
    GraphPart part{
        message.id, message.call, message.site, message.reply, message.peer, send->num_outputs(), {}, 0, 0};
    follow(send->next_edges(), part);
    graph.parts.push_back(std::move(part));
  }
  for (const at::Tensor& root : roots) {
    GraphPart part;
    part.to = me.rank();
    part.tensors = 1;
    if (root.defined() && root.requires_grad()) follow({torch::autograd::impl::gradient_edge(root)}, part);
    graph.parts.push_back(std::move(part));
  }
  return graph;
}

std::string ContextGraph::dot() const {
  std::map<std::uint64_t, std::uint32_t> receivers;
  for (const WorkerGraph& worker : workers) {
    for (const GraphPart& part : worker.parts) {
      if (part.message != 0) receivers[part.message] = part.to;
    }
  }
  std::string dot =
      fmt::format("digraph \"context {:#x}\" {{\n  rankdir=LR;\n  node [shape=ellipse];\n", context);
  for (const WorkerGraph& worker : workers) write_worker(worker, receivers, dot);
  for (const WorkerGraph& worker : workers) {
    for (const GraphPart& part : worker.parts) {
      if (part.message == 0) continue;
      dot += fmt::format("  \"send_{0:x}\" -> \"recv_{0:x}\" [label={1}, style=bold];\n", part.message,
                         quoted(label_of(part)));
    }
  }
  return dot + "}\n";
}

StallSurvey::StallSurvey(const std::vector<PartReport>& parts) {
  bool busy = false;
  std::uint64_t received = 0;
  for (const PartReport& part : parts) {
    busy = busy || part.busy || part.silent;
    if (part.silent) waiting += fmt::format("\n  worker '{}' does not answer", part.worker);
    if (part.busy) at_work += fmt::format("\n  worker '{}' is still running nodes", part.worker);
    for (const std::string& line : part.crowded)
      at_work += fmt::format("\n  worker '{}': {}", part.worker, line);
    executed += part.executed;
    sent += part.sent;
    received += part.received;
    for (const WaitingSend& send : part.waiting) {
      unanswered = unanswered || send.unanswered;
      waiting += fmt::format("\n  worker '{}' sent {} of '{}' to worker '{}' as message {:#x}{}{}",
                             part.worker, send.reply ? "the result" : "arguments", send.call, send.to,
                             send.message, send.site.empty() ? "" : fmt::format(", called at {}", send.site),
                             send.unanswered ? ", and got no result of that call" : "");
    }
  }
  quiet = !busy && sent == received && !waiting.empty();
}

const char* StallSurvey::stall_advice() const {
  if (unanswered) {
    return "backward() in FAST mode cannot end, because these sends get no gradient. FAST mode also waits "
           "for "
           "what a failed call sent in this context, even if the call was repeated: repeat the whole step in "
           "a new autograd::Context, or use PassMode::kSmart, which detects which sends take part:";
  }
  return "backward() in FAST mode cannot end, because these sends get no gradient: the loss does not depend "
         "on "
         "them. In the next step use PassMode::kSmart, which detects which sends take part, or detach what "
         "you "
         "do not use:";
}

bool StallSurvey::is_stalled_since(const StallSurvey& before) const {
  return before.quiet && quiet && executed == before.executed && sent == before.sent;
}

namespace {

PartReport silent_part(std::uint32_t, const std::string& name) {
  PartReport part;
  part.worker = name;
  part.silent = true;
  return part;
}

WorkerGraph silent_graph(std::uint32_t rank, const std::string& name) { return {name, rank, true, {}}; }

// Clears the accumulated gradients of a context: the caller asks one worker after another, and each answers
// with the workers that it communicated with. Before that, each waits until the workers that it notified of a
// failed pass have answered: one that does not know of the failure could begin that pass after it was cleared.

ClearedPart clear_part(ContextState& context) {
  ClearedPart part;
  part.running = !context.change_gradients([](engine::GradientMap& gradients) { gradients.clear(); });
  for (const std::uint32_t rank : context.workers()) part.peers.push_back(rank);
  return part;
}

/// Clears when no worker can begin a pass any more that has failed here.
Future<ClearedPart> clear_when_notified(const std::shared_ptr<ContextState>& context) {
  return context->failures_notified().then([context](const Future<void>&) { return clear_part(*context); });
}

void check_cleared(const ClearedPart& part, const std::string& worker) {
  if (!part.running) return;
  throw_invalid(
      "clear_gradients(): a backward pass of this context still runs on worker '{}'; wait for it, then clear "
      "again",
      worker);
}

/// Skips a worker that is gone.
void ask_to_clear(std::map<std::uint32_t, Future<ClearedPart>>& asked, const Worker& me, std::uint32_t rank,
                  std::uint64_t context, Deadline deadline) {
  try {
    asked.emplace(rank, me.request(Destination(rank), ClearGradients{context}, deadline));
  } catch (const Error&) {
    if (me.backend()->is_present(rank)) throw;
  }
}

/// The answer of `rank`; nullopt if that worker is gone, with its gradients.
std::optional<ClearedPart> cleared_part_of(const Worker& me, std::uint32_t rank,
                                           const Future<ClearedPart>& answer) {
  try {
    return answer.wait();
  } catch (const Error& error) {
    if (!me.backend()->is_present(rank)) return std::nullopt;
    throw Error(error.kind(),
                fmt::format("clear_gradients(): worker '{}' may still have gradients of this context, clear "
                            "again: {}",
                            me.backend()->name_of(rank), error.message()))
        .with_worker(me.backend()->name_of(rank));
  }
}

}  // namespace

void ContextQueries::serve(rpc::Registrar& registrar) {
  // Not on the pool: all of its threads may be running nodes.
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kReceiver, &ContextQueries::ask_pass);
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kPool, &ContextQueries::ask_graph);
  registrar.handle<ClearGradients>(
      rpc::RunOn::kPool, [registry = registry_](const rpc::CallInfo&, const ClearGradients& message) {
        const auto context = registry->find(message.context);
        return context ? clear_when_notified(context) : make_ready_future<ClearedPart>();
      });
}

PartReport ContextQueries::report_of(ContextState& context, std::uint64_t id) const {
  const Worker me = worker_.require();
  auto pass = context.pass();
  if (pass && pass->id() == id) {
    const PartReport report = pass->report();
    PassState::release_on_pool(std::move(pass));
    return report;
  }
  PartReport part;
  part.worker = me.name();
  if (const auto work = context.ended_pass(id)) {
    part.executed = work->executed;
    part.sent = work->sent;
    part.received = work->received;
    return part;
  }
  for (const MessageInfo& message : context.sends().messages()) {
    part.waiting.push_back({message.id, message.call, message.site, message.reply,
                            me.backend()->name_of(message.peer), context.sends().is_unanswered(message.id)});
  }
  return part;
}

StallSurvey ContextQueries::survey(ContextState& context, std::uint64_t pass) const {
  const AskPass question{context.id(), pass, registry_->next_id(), kPatience.count()};
  context.is_first_of(question.wave);
  auto answers = std::make_shared<Promise<std::vector<PartReport>>>(worker_.continuations());
  ask_all(worker_.require(), context, question, {report_of(context, pass)}, silent_part,
          [answers](std::vector<PartReport> parts) { answers->set_value(std::move(parts)); });
  return StallSurvey(answers->future().wait());
}

void ContextQueries::ask_pass(std::uint32_t, AskPass message, Answer<AskPass> answer) {
  auto context = registry_->find(message.context);
  if (!context || !context->is_first_of(message.wave)) return answer.give({});
  ask_all(worker_.require(), *context, message, {report_of(*context, message.pass)}, silent_part,
          [answer = std::make_shared<Answer<AskPass>>(std::move(answer))](
              const std::vector<PartReport>& parts) { answer->give(parts); });
}

void ContextQueries::ask_graph(std::uint32_t, AskGraph message, Answer<AskGraph> answer) {
  auto context = registry_->find(message.context);
  if (!context || !context->is_first_of(message.wave)) return answer.give({});
  const Worker me = worker_.require();
  ask_all(me, *context, message, {graph_of(me, *context, {})}, silent_graph,
          [answer = std::make_shared<Answer<AskGraph>>(std::move(answer))](
              const std::vector<WorkerGraph>& graphs) { answer->give(graphs); });
}

ContextGraph ContextQueries::graph(ContextState& context, const std::vector<at::Tensor>& roots) const {
  const Worker me = worker_.require();
  const AskGraph question{context.id(), registry_->next_id(), kPatience.count()};
  context.is_first_of(question.wave);
  auto answers = std::make_shared<Promise<std::vector<WorkerGraph>>>(worker_.continuations());
  ask_all(me, context, question, {graph_of(me, context, roots)}, silent_graph,
          [answers](std::vector<WorkerGraph> graphs) { answers->set_value(std::move(graphs)); });
  ContextGraph graph{context.id(), answers->future().wait()};
  std::sort(graph.workers.begin(), graph.workers.end(),
            [](const WorkerGraph& a, const WorkerGraph& b) { return a.rank < b.rank; });
  return graph;
}

void ContextQueries::clear_gradients(ContextState& context, Duration timeout) const {
  const Worker me = worker_.require();
  const Deadline deadline = me.runtime().executor.deadline_in(no_limit_if_zero(timeout));
  const Future<void> notified = context.failures_notified();
  // What completes it runs on the pool, of which this thread may be the only one.
  std::optional<Pool::ExtraThread> extra;
  if (!notified.done()) extra.emplace(me.backend()->pool());
  if (!notified.wait_until(deadline)) {
    throw Error(
        ErrorKind::kTimedOut,
        "clear_gradients(): a worker has not confirmed that the failed backward pass of this context has "
        "ended there; wait until it answers or is declared dead, then clear again");
  }
  extra.reset();
  const ClearedPart mine = clear_part(context);
  check_cleared(mine, me.name());
  std::set<std::uint32_t> known(mine.peers.begin(), mine.peers.end());
  known.insert(me.rank());
  std::vector<std::uint32_t> next(mine.peers.begin(), mine.peers.end());
  while (!next.empty()) {
    std::map<std::uint32_t, Future<ClearedPart>> asked;
    for (const std::uint32_t rank : std::exchange(next, {})) {
      if (rank != me.backend()->self().rank) ask_to_clear(asked, me, rank, context.id(), deadline);
    }
    for (const auto& [rank, answer] : asked) {
      const std::optional<ClearedPart> part = cleared_part_of(me, rank, answer);
      if (!part) continue;
      check_cleared(*part, me.backend()->name_of(rank));
      for (const std::uint32_t peer : part->peers) {
        if (known.insert(peer).second) next.push_back(peer);
      }
    }
  }
}

}  // namespace torchspan::autograd
