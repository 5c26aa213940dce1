#include "autograd/contexts/context_graph.h"

#include <fmt/format.h>
#include <map>
#include <set>
#include <unordered_set>

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

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

WorkerGraph graph_of(const Worker& me, const ContextState& context, const std::vector<at::Tensor>& roots) {
  WorkerGraph graph{me.name(), me.endpoint()->self().rank, false, {}};
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

}  // namespace torchspan::autograd
