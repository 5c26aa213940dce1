#include "autograd/contexts/context_queries.h"

#include <algorithm>
#include <utility>

#include "autograd/contexts/context_graph.h"
#include "autograd/messages/ask_all.h"
#include "autograd/passes/pass_state.h"

namespace torchspan::autograd {
namespace {

PartReport silent_part(std::uint32_t, const std::string& name) {
  PartReport part;
  part.worker = name;
  part.silent = true;
  return part;
}

WorkerGraph silent_graph(std::uint32_t rank, const std::string& name) { return {name, rank, true, {}}; }

}  // namespace

void ContextQueries::serve(rpc::Registrar& registrar) {
  // Not on the pool: all of its threads may be running nodes.
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kReceiver, &ContextQueries::ask_pass);
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kPool, &ContextQueries::ask_graph);
}

PartReport ContextQueries::report_of(ContextState& context, std::uint64_t id) const {
  const Worker me = worker_.require();
  auto pass = context.pass();
  if (pass && pass->id() == id) {
    const PartReport report = pass->report();
    PassOwner::release_on_pool(std::move(pass));
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
                            me.endpoint()->name_of(message.peer), context.sends().is_unanswered(message.id)});
  }
  return part;
}

StallSurvey ContextQueries::survey(ContextState& context, std::uint64_t pass) const {
  const AskPass question{context.id(), pass, registry_->next_id(), kPatience.count()};
  context.is_first_of(question.wave);
  auto answers = std::make_shared<Promise<std::vector<PartReport>>>(worker_.host());
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
  auto answers = std::make_shared<Promise<std::vector<WorkerGraph>>>(worker_.host());
  ask_all(me, context, question, {graph_of(me, context, roots)}, silent_graph,
          [answers](std::vector<WorkerGraph> graphs) { answers->set_value(std::move(graphs)); });
  ContextGraph graph{context.id(), answers->future().wait()};
  std::sort(graph.workers.begin(), graph.workers.end(),
            [](const WorkerGraph& a, const WorkerGraph& b) { return a.rank < b.rank; });
  return graph;
}

}  // namespace torchspan::autograd
