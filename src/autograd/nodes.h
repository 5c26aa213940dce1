#pragma once
#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

namespace torchspan::autograd {

/// The message that a pair of nodes stands for, as one of its two workers sees it.
struct MessageInfo {
  std::uint64_t id = 0;
  std::uint32_t peer = 0;  ///< rank of the other worker
  std::string call;
  std::string site;  ///< where the program made the call, if that is known
  bool reply = false;

  /// "the result of 'Layer.forward' (called at train.cpp:41)".
  std::string text() const;
};

/// Where a message left this worker: its inputs are the gradients that come back, its edges lead into the
/// graph that made the tensors.
class SendNode final : public torch::autograd::Node {
 public:
  explicit SendNode(MessageInfo message) : message_(std::move(message)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return gradients;
  }
  std::string name() const override { return "SendNode(" + message_.call + ")"; }
  const MessageInfo& message() const { return message_; }

 private:
  const MessageInfo message_;
};

/// Where a message came in: sends the gradients of its tensors back to the worker that sent them. Works only
/// inside a distributed pass; LibTorch's own engine is refused with the advice to use context.backward().
class RecvNode final : public torch::autograd::Node {
 public:
  explicit RecvNode(MessageInfo message) : message_(std::move(message)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "RecvNode(" + message_.call + ")"; }
  const MessageInfo& message() const { return message_; }

 private:
  const MessageInfo message_;
};

}  // namespace torchspan::autograd
