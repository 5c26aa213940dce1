#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/core/spans.h>
#include <torchspan/detail/device/copies.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/detail/rpc/message.h>

#include "engine/api/graph_pass.h"
#include "engine/api/node_ptr.h"

namespace torchspan::autograd {

/// A message whose tensors have a send node and a receive node, as one of its two workers sees it.
struct MessageInfo {
  std::uint64_t id = 0;
  std::uint32_t peer = 0;  ///< rank of the other worker
  std::string call;
  std::string site;  ///< call site, if known
  bool reply = false;
  std::uint64_t context = 0;

  /// "the result of 'Layer.forward' (called at train.cpp:41)".
  std::string text() const;
  /// "send gradients: result of Layer.forward".
  std::string span_name(const char* verb) const;
};

/// Stands for a message on its sender: its inputs are the gradients that come back, its edges lead to the
/// graph that produced the tensors. Records a span when the gradients have come.
class SendNode final : public torch::autograd::Node {
 public:
  /// `spans` are those of the worker.
  SendNode(MessageInfo message, SpanRecorder& spans) : message_(std::move(message)), spans_(spans) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "SendNode(" + message_.call + ")"; }
  const MessageInfo& message() const { return message_; }
  /// Moves gradients to the devices of their tensors, from the CPU or from where a device map placed them. They are
  /// then ready on this thread's current streams.
  void place(torch::autograd::variable_list& gradients, device::CopyStreams& copies) const;

 private:
  const MessageInfo message_;
  SpanRecorder& spans_;
};

using SendNodePtr = engine::NodePtrTo<SendNode>;

/// Stands for a message on its receiver: sends the gradients of its tensors back to the worker that sent
/// them, and records a span. Only a distributed pass runs it, as soon as its gradients are complete, so that
/// they are sent while the rest of the graph runs; LibTorch's engine gets an error. `arrival` increases from
/// message to message.
class RecvNode final : public engine::PassNode {
 public:
  RecvNode(MessageInfo message, SpanRecorder& spans, std::uint64_t arrival)
      : PassNode(arrival), message_(std::move(message)), spans_(spans) {}
  void run(torch::autograd::variable_list gradients, engine::GradientSink& sink) override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "RecvNode(" + message_.call + ")"; }
  const MessageInfo& message() const { return message_; }
  /// Where the sender of the message uses its gradients. Gradients of a result go like an argument, those of an
  /// argument like a result, by the caller's device map.
  rpc::DevicePlace gradient_place() const {
    return {message_.reply ? rpc::DevicePlace::By::kArguments : rpc::DevicePlace::By::kResults};
  }
  /// Throws Error{kInvalid} if the message belongs to another context than this one.
  void check_context(std::uint64_t context) const;

 private:
  const MessageInfo message_;
  SpanRecorder& spans_;
};

class ContextState;
class Registry;

/// Records in the current context how tensors are sent, in requests and replies: a send node on the sender, a
/// receive node on the receiver. Gives handlers the context of their call.
class EdgeInterceptor final : public rpc::Interceptor {
 public:
  EdgeInterceptor(Runtime& runtime, std::shared_ptr<Registry> registry)
      : runtime_(runtime), registry_(std::move(registry)) {}

  /// Sets what is called when a peer's first message in a context arrives; the peer may be gone by then. Set
  /// it before the first message.
  void when_peer_added(std::function<void(const std::shared_ptr<ContextState>&, std::uint32_t)> callback) {
    peer_added_ = std::move(callback);
  }
  std::string_view name() const override { return "autograd"; }
  Bytes outgoing(const rpc::CallInfo& call, std::span<at::Tensor> tensors) override;
  void undo(const rpc::CallInfo& call, BytesView header) override;
  rpc::EnvironmentValuePtr incoming(const rpc::CallInfo& call, std::span<at::Tensor> tensors,
                                    BytesView header) override;

 private:
  Runtime& runtime_;
  const std::shared_ptr<Registry> registry_;
  std::function<void(const std::shared_ptr<ContextState>&, std::uint32_t)> peer_added_;
  std::atomic<std::uint64_t> arrivals_{0};  // of messages with receive nodes
};

}  // namespace torchspan::autograd
