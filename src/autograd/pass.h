#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/autograd/context.h>
#include <torchspan/engine/gradient_map.h>
#include <torchspan/engine/graph_pass.h>

#include "autograd/state.h"

namespace torchspan::autograd {

/// One worker's part of one backward pass: its local graph, fed by gradients that arrive for the sends, and
/// the gradients it sends back. FAST (design: every send of the context takes part).
class PassState : public std::enable_shared_from_this<PassState> {
 public:
  PassState(Worker worker, std::shared_ptr<ContextState> context, std::uint64_t id, bool retain_graph);

  std::uint64_t id() const { return id_; }
  const std::shared_ptr<ContextState>& context() const { return context_; }

  /// Counts the dependencies of the loss's graph and of all sends. Once, by whoever began the pass.
  void prepare(const std::vector<at::Tensor>& roots);
  /// Gradients for the tensors of one message of ours.
  void receive(std::uint64_t message, std::vector<at::Tensor> gradients);
  /// Does the work that is ready, on this thread.
  void drive();
  /// RecvNode: sends gradients to the worker that the tensors came from.
  void send_back(const RecvNode& node, torch::autograd::variable_list gradients);

  /// The first failure ends the pass here and tells everybody who may take part.
  void fail(const Error& error);
  /// Somebody else's failure; told on to those that may not know.
  void aborted_elsewhere(const std::string& reason);
  /// Calls back when this worker's part is over, the answers to its gradients included.
  void after(engine::PassEnd::Callback callback) { sink_.after_pass(std::move(callback)); }
  void wait(Deadline deadline) { sink_.end()->wait(deadline); }
  /// Sends that still wait for their gradient, for the report of a stall.
  std::string describe_waiting() const;

 private:
  std::string blame(const Error& error) const;
  void tell_abort(const std::string& reason);

  const Worker worker_;
  const std::shared_ptr<ContextState> context_;
  const std::uint64_t id_;
  const bool retain_graph_;
  engine::MapSink sink_;
  engine::GraphPass graph_;
  std::vector<std::shared_ptr<SendNode>> sends_;
  std::atomic<bool> told_{false};
};

}  // namespace torchspan::autograd
