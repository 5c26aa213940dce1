#pragma once
#include <memory>
#include <string>

namespace torchspan::autograd {

class ContextState;
class PassState;

/// What this thread works in: a context; while it drives a pass, the pass; in a handler, the place in the
/// caller's program that its call was made at. The library's only thread-local state; set by scopes alone.
struct Current {
  std::shared_ptr<ContextState> context;
  PassState* pass = nullptr;
  std::shared_ptr<const std::string> site = nullptr;
};

const Current& current_state();

/// Puts `next` in force until it ends; ends on the thread that made it.
class CurrentScope {
 public:
  explicit CurrentScope(Current next);
  ~CurrentScope();
  CurrentScope(const CurrentScope&) = delete;
  CurrentScope& operator=(const CurrentScope&) = delete;

 private:
  Current previous_;
};

}  // namespace torchspan::autograd
