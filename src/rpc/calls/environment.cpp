#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <torchspan/detail/rpc/environment.h>

#include "rpc/calls/serving.h"

namespace torchspan::rpc {
namespace {

const c10::impl::LocalDispatchKeySet& new_thread_keys() {
  static const c10::impl::LocalDispatchKeySet keys(c10::impl::PODLocalDispatchKeySet{});
  return keys;
}

/// Whether LibTorch's state of this thread is that of a new thread. One of these shows everything that
/// changes how operators run: functorch and autocast are in the keys, profilers in the debug info.
bool is_default_state() {
  const c10::AutogradState& modes = c10::AutogradState::get_tls_state();
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return modes.get_grad_mode() && !modes.get_inference_mode() && modes.get_fw_grad_mode() &&
         keys.included_ == new_thread_keys().included_ && keys.excluded_ == new_thread_keys().excluded_ &&
         c10::ThreadLocalDebugInfo::current() == nullptr;
}

void reset_to_defaults() {
  c10::AutogradState modes = c10::AutogradState::get_tls_state();
  modes.set_grad_mode(true);
  modes.set_inference_mode(false);
  modes.set_fw_grad_mode(true);
  c10::AutogradState::set_tls_state(modes);
  c10::impl::_force_tls_local_dispatch_key_set(new_thread_keys());
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
}

}  // namespace

struct Environment::Values {
  IncomingPtr served;
  std::vector<EnvironmentValuePtr> values;
};

Environment::ValuesPtr& Environment::of_thread() {
  thread_local ValuesPtr the_values;
  return the_values;
}

Environment Environment::of_call(IncomingPtr call) {
  Environment environment;
  if (call->info.no_grad) {
    const EnvironmentScope default_scope{Environment()};
    const at::NoGradGuard no_grad;
    environment.torch_ = std::make_shared<const at::ThreadLocalState>();
  }
  environment.autocast_ = call->inherited.autocast;
  std::vector<EnvironmentValuePtr> values = call->inherited.values;
  environment.values_ = std::make_shared<const Values>(Values{std::move(call), std::move(values)});
  return environment;
}

Environment Environment::capture() {
  Environment environment;
  environment.values_ = of_thread();
  const auto stays = [](const EnvironmentValuePtr& value) { return !value->is_captured(); };
  if (environment.values_ && std::ranges::any_of(environment.values_->values, stays)) {
    auto captured = std::make_shared<Values>(*environment.values_);
    std::erase_if(captured->values, stays);
    environment.values_ = std::move(captured);
  }
  environment.streams_ = device::Streams::current_side();
  if (is_default_state()) return environment;
  environment.torch_ = std::make_shared<const at::ThreadLocalState>();
  if (device::Autocast autocast = device::Autocast::of_thread(); autocast.enabled())
    environment.autocast_ = std::make_shared<const device::Autocast>(std::move(autocast));
  return environment;
}

const IncomingPtr& Environment::served() {
  static const IncomingPtr none;
  const ValuesPtr& here = of_thread();
  return here ? here->served : none;
}

const EnvironmentValue* Environment::find(const std::type_info& type) {
  const ValuesPtr& here = of_thread();
  if (!here) return nullptr;
  for (const EnvironmentValuePtr& value : here->values) {
    const EnvironmentValue& one = *value;
    if (typeid(one) == type) return value.get();
  }
  return nullptr;
}

EnvironmentValuePtr Environment::exchange(const std::type_info& type, EnvironmentValuePtr value) {
  ValuesPtr& here = of_thread();
  auto next = here ? std::make_shared<Values>(*here) : std::make_shared<Values>();
  const auto found = std::ranges::find_if(next->values, [&](const EnvironmentValuePtr& one) {
    const EnvironmentValue& there = *one;
    return typeid(there) == type;
  });
  EnvironmentValuePtr before;
  if (found == next->values.end()) {
    if (value) next->values.push_back(std::move(value));
  } else if (value) {
    before = std::exchange(*found, std::move(value));
  } else {
    before = std::move(*found);
    next->values.erase(found);
  }
  const bool nothing = !next->served && next->values.empty();
  ValuesPtr outside = std::exchange(here, nothing ? nullptr : ValuesPtr(std::move(next)));
  return before;
}

EnvironmentScope::EnvironmentScope(const Environment& inside)
    : autocast_(inside.autocast_ != nullptr), streams_(inside.streams_) {
  const bool was_default = is_default_state();
  // A captured state contains more than is_default_state() checks: save all of the current state.
  if (!was_default || inside.torch_ || inside.autocast_)
    outside_torch_ = std::make_unique<const at::ThreadLocalState>();
  outside_ = std::exchange(Environment::of_thread(), inside.values_);
  if (inside.torch_) {
    at::ThreadLocalState::setThreadLocalState(*inside.torch_);
  } else if (!was_default) {
    reset_to_defaults();
  }
  if (inside.autocast_) {
    // LibTorch has one cache of casts for all threads: a handler without gradients would give its casts, which have no
    // graph, to another one that trains the same module.
    device::Autocast uncached = *inside.autocast_;
    uncached.cache = false;
    autocast_.enter(uncached);
  }
}

EnvironmentScope::~EnvironmentScope() {
  Environment::of_thread().swap(outside_);
  if (outside_torch_) {
    at::ThreadLocalState::setThreadLocalState(*outside_torch_);
  } else if (!is_default_state()) {
    reset_to_defaults();
  }
}

void CapturedTaskEnvironment::run(std::coroutine_handle<> step) {
  const EnvironmentScope scope(inside_);
  step.resume();
  inside_ = Environment::capture();
}

}  // namespace torchspan::rpc
