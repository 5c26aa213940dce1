#pragma once
#include <memory>
#include <vector>

#include <ATen/ThreadLocalState.h>

#include <torchspan/core/task.h>
#include <torchspan/rpc/extension.h>

#include "rpc/core.h"

namespace torchspan::rpc {

/// The state of a handler that is a coroutine: LibTorch's thread-local state (grad mode and the rest) and the
/// scopes of its call. Taken from the thread that starts it, then from where each of its steps left off.
class HandlerEnvironment final : public TaskEnvironment {
 public:
  explicit HandlerEnvironment(IncomingPtr call) : call_(std::move(call)) {}

  void run(std::coroutine_handle<> step) override {
    struct Restore {
      at::ThreadLocalState outside;
      ~Restore() { at::ThreadLocalState::setThreadLocalState(outside); }
    } restore;
    at::ThreadLocalState::setThreadLocalState(inside_);
    ServingScope serving(call_);
    step.resume();
    inside_ = at::ThreadLocalState();
    for (const auto& scope : call_->scopes) scope->save();
  }

 private:
  at::ThreadLocalState inside_;
  const IncomingPtr call_;
};

}  // namespace torchspan::rpc
