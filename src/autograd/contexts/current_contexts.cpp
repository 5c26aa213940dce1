#include "autograd/contexts/current_contexts.h"

#include <algorithm>

#include "autograd/contexts/context_state.h"

namespace torchspan::autograd {
namespace {

using Entry = CurrentContexts::Entry;

/// Work that continues on another thread is not part of the pass.
struct DrivenPass final : rpc::EnvironmentValue {
  explicit DrivenPass(PassState* pass) : pass(pass) {}
  bool is_captured() const override { return false; }
  PassState* const pass;
};

/// Makes `next` current for `worker` on this thread and returns the entry before; an empty context means none.
Entry exchange(const void* worker, Entry next) {
  std::vector<Entry> entries;
  if (const CurrentContexts* here = CurrentContexts::of_thread()) entries = here->entries();
  const auto found = std::ranges::find_if(
      entries, [worker](const Entry& entry) { return entry.context->worker() == worker; });
  Entry before;
  if (found != entries.end()) {
    before = std::move(*found);
    entries.erase(found);
  }
  if (next.context) entries.push_back(std::move(next));
  rpc::Environment::exchange<CurrentContexts>(
      entries.empty() ? nullptr : std::make_shared<const CurrentContexts>(std::move(entries)));
  return before;
}

}  // namespace

const Entry* CurrentContexts::of(const void* worker) const {
  const auto found = std::ranges::find_if(
      entries_, [worker](const Entry& entry) { return entry.context->worker() == worker; });
  return found == entries_.end() ? nullptr : &*found;
}

const Entry* current_of(const void* worker) {
  const CurrentContexts* here = CurrentContexts::of_thread();
  return here == nullptr ? nullptr : here->of(worker);
}

PassState* current_pass() {
  const auto* driven = rpc::Environment::find<DrivenPass>();
  return driven == nullptr ? nullptr : driven->pass;
}

CurrentScope::CurrentScope(std::shared_ptr<ContextState> context)
    : context_(std::move(context)), before_(exchange(context_->worker(), {context_})) {}
CurrentScope::~CurrentScope() {
  if (in_force()) exchange(context_->worker(), std::move(before_));
}
bool CurrentScope::in_force() const {
  const Entry* here = current_of(context_->worker());
  return here != nullptr && here->context == context_;
}

WorkScope::WorkScope(std::shared_ptr<ContextState> context, PassState* pass) {
  const void* worker = context->worker();
  const Entry* here = current_of(worker);
  exchange(worker, {std::move(context), here == nullptr ? nullptr : here->site});
  rpc::Environment::exchange<DrivenPass>(pass == nullptr ? nullptr
                                                         : std::make_shared<const DrivenPass>(pass));
}

}  // namespace torchspan::autograd
