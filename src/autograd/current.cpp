#include "autograd/current.h"

#include <utility>

#include "autograd/state.h"

namespace torchspan::autograd {
namespace {
thread_local Current the_current;
}

const Current& current_state() { return the_current; }

CurrentScope::CurrentScope(Current next)
    : context_(next.context.get()), previous_(std::exchange(the_current, std::move(next))) {}
CurrentScope::~CurrentScope() {
  if (in_force()) the_current = std::move(previous_);
}
bool CurrentScope::in_force() const { return the_current.context.get() == context_; }

}  // namespace torchspan::autograd
