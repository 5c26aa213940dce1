#pragma once
#include <atomic>
#include <functional>
#include <memory>

#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/registry.h"

namespace torchspan::autograd {

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
