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

/// Puts `next` in force until it ends; ends on the thread that made it, or in the coroutine that did. Where
/// it is not in force, its end changes nothing.
class CurrentScope {
 public:
  explicit CurrentScope(Current next);
  ~CurrentScope();
  CurrentScope(const CurrentScope&) = delete;
  CurrentScope& operator=(const CurrentScope&) = delete;
  /// Whether this thread works in its context.
  bool in_force() const;

 private:
  const ContextState* const context_;
  Current previous_;
};

}  // namespace torchspan::autograd
