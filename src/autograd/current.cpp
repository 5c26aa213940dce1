#include "autograd/current.h"

#include <utility>

#include "autograd/state.h"

namespace torchspan::autograd {
namespace {
thread_local Current the_current;
}

const Current& current_state() { return the_current; }

CurrentScope::CurrentScope(Current next) : previous_(std::exchange(the_current, std::move(next))) {}
CurrentScope::~CurrentScope() { the_current = std::move(previous_); }

}  // namespace torchspan::autograd
