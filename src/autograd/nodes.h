#pragma once
#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/core/spans.h>

#include "engine/api/pass_node.h"

namespace torchspan::autograd {

/// The message that a pair of nodes stands for, as one of its two workers sees it.
struct MessageInfo {
  std::uint64_t id = 0;
  std::uint32_t peer = 0;  ///< rank of the other worker
  std::string call;
  std::string site;  ///< where the program made the call, if that is known
  bool reply = false;
  std::uint64_t context = 0;

  /// "the result of 'Layer.forward' (called at train.cpp:41)".
  std::string text() const;
  /// "send gradients: result of Layer.forward".
  std::string span_name(const char* deed) const;
};

/// Where a message left this worker: its inputs are the gradients that come back, its edges lead into the
/// graph that made the tensors. In a pass, a span tells when they came.
class SendNode final : public torch::autograd::Node {
 public:
  /// `spans` are those of the worker, which passes run on.
  SendNode(MessageInfo message, SpanRing& spans) : message_(std::move(message)), spans_(spans) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "SendNode(" + message_.call + ")"; }
  const MessageInfo& message() const { return message_; }
  /// Takes gradients, which come by way of the CPU, to the devices of the tensors that they are for.
  void place(torch::autograd::variable_list& gradients) const;

 private:
  const MessageInfo message_;
  SpanRing& spans_;
};

/// Where a message came in: sends the gradients of its tensors back to the worker that sent them, in a span.
/// Only a distributed pass runs it, as soon as its gradients are complete, so that they travel while the rest
/// of the graph runs; LibTorch's own engine is refused, inside a pass and outside. `arrival` grows from
/// message to message.
class RecvNode final : public engine::PassNode {
 public:
  RecvNode(MessageInfo message, SpanRing& spans, std::uint64_t arrival)
      : PassNode(arrival), message_(std::move(message)), spans_(spans) {}
  void run(torch::autograd::variable_list gradients, engine::GradientSink& sink) override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "RecvNode(" + message_.call + ")"; }
  const MessageInfo& message() const { return message_; }

 private:
  const MessageInfo message_;
  SpanRing& spans_;
};

}  // namespace torchspan::autograd
