#pragma once
#include <atomic>
#include <functional>
#include <memory>

#include <torchspan/detail/rpc/extension.h>

#include "autograd/registry.h"

namespace torchspan::autograd {

/// Records in the current context how tensors travel: a send node where they leave, a receive node where they
/// come in, for requests and replies alike; and gives handlers the context of their call.
class EdgeInterceptor final : public rpc::Interceptor {
 public:
  EdgeInterceptor(Runtime& runtime, std::shared_ptr<Registry> registry)
      : runtime_(runtime), registry_(std::move(registry)) {}

  /// Hears of a context that another worker's message has told of, and of that worker: it may be gone by now.
  /// Set before the first message.
  void when_heard_of(std::function<void(const std::shared_ptr<ContextState>&, std::uint32_t)> callback) {
    heard_of_ = std::move(callback);
  }
  std::string_view name() const override { return "autograd"; }
  Bytes outgoing(const rpc::CallInfo& call, std::span<at::Tensor> tensors) override;
  void undo(const rpc::CallInfo& call, BytesView header) override;
  rpc::EnvironmentValuePtr incoming(const rpc::CallInfo& call, std::span<at::Tensor> tensors,
                                    BytesView header) override;

 private:
  Runtime& runtime_;
  const std::shared_ptr<Registry> registry_;
  std::function<void(const std::shared_ptr<ContextState>&, std::uint32_t)> heard_of_;
  std::atomic<std::uint64_t> arrivals_{0};  // of messages that receive nodes stand for
};

}  // namespace torchspan::autograd
