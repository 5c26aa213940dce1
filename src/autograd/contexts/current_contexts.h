#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/rpc/environment.h>

namespace torchspan::autograd {

class ContextState;
class PassState;

/// The autograd contexts of an environment, at most one for each worker of this process. A handler's entry
/// has the call site of its call.
class CurrentContexts final : public rpc::EnvironmentValue {
 public:
  struct Entry {
    std::shared_ptr<ContextState> context;
    std::shared_ptr<const std::string> site = nullptr;
  };
  explicit CurrentContexts(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  /// The contexts of this thread; null if there are none.
  static const CurrentContexts* of_thread() { return rpc::Environment::find<CurrentContexts>(); }
  /// The entry of the worker that `worker` identifies (ContextState::worker()), or null.
  const Entry* of(const void* worker) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  const std::vector<Entry> entries_;
};

/// This thread's entry for a worker, or null.
const CurrentContexts::Entry* current_of(const void* worker);
/// The pass that this thread drives, or null.
PassState* current_pass();

/// Makes a context current for its worker while the scope lives. Destroy it on the thread, or in the
/// coroutine, that created it; elsewhere its destructor has no effect.
class CurrentScope {
 public:
  explicit CurrentScope(std::shared_ptr<ContextState> context);
  ~CurrentScope();
  CurrentScope(const CurrentScope&) = delete;
  CurrentScope& operator=(const CurrentScope&) = delete;
  /// Whether its context is current on this thread.
  bool in_force() const;

 private:
  std::shared_ptr<ContextState> context_;
  CurrentContexts::Entry before_;
};

/// The same for work of the library, and sets the pass that the thread drives. Its destructor restores the
/// environment from before, whatever contexts hooks left current.
class WorkScope {
 public:
  explicit WorkScope(std::shared_ptr<ContextState> context, PassState* pass = nullptr);

 private:
  rpc::EnvironmentValuesScope before_;
};

}  // namespace torchspan::autograd
