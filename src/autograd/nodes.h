#pragma once
#include <cstdint>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

namespace torchspan::autograd {

/// Where a message left this worker: its inputs are the gradients that come back, its edges lead into the
/// graph that made the tensors.
class SendNode final : public torch::autograd::Node {
 public:
  SendNode(std::uint64_t message, std::uint32_t to, std::string call)
      : message_(message), to_(to), call_(std::move(call)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return gradients;
  }
  std::string name() const override { return "SendNode(" + call_ + ")"; }

  std::uint64_t message() const { return message_; }
  std::uint32_t to() const { return to_; }
  const std::string& call() const { return call_; }

 private:
  const std::uint64_t message_;
  const std::uint32_t to_;
  const std::string call_;
};

/// Where a message came in: sends the gradients of its tensors back to the worker that sent them. Works only
/// inside a distributed pass; LibTorch's own engine is refused with the advice to use context.backward().
class RecvNode final : public torch::autograd::Node {
 public:
  RecvNode(std::uint64_t message, std::uint32_t from, std::string call)
      : message_(message), from_(from), call_(std::move(call)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "RecvNode(" + call_ + ")"; }

  std::uint64_t message() const { return message_; }
  std::uint32_t from() const { return from_; }
  const std::string& call() const { return call_; }

 private:
  const std::uint64_t message_;
  const std::uint32_t from_;
  const std::string call_;
};

}  // namespace torchspan::autograd
