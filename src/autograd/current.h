#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/rpc/environment.h>

namespace torchspan::autograd {

class ContextState;
class PassState;

/// The autograd contexts of an environment, one for each worker of this process at most; a handler's with the
/// place in the caller's program that its call was made at.
class CurrentContexts final : public rpc::EnvironmentValue {
 public:
  struct Entry {
    std::shared_ptr<ContextState> context;
    std::shared_ptr<const std::string> site = nullptr;
  };
  explicit CurrentContexts(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  /// Those of this thread; null: none.
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

/// Makes a context the current one of its worker while it lives, for a scope of the program's: ends on the
/// thread that made it, or in the coroutine that did. Where it is not in force, its end changes nothing.
class CurrentScope {
 public:
  explicit CurrentScope(std::shared_ptr<ContextState> context);
  ~CurrentScope();
  CurrentScope(const CurrentScope&) = delete;
  CurrentScope& operator=(const CurrentScope&) = delete;
  /// Whether this thread works in its context.
  bool in_force() const;

 private:
  std::shared_ptr<ContextState> context_;
  CurrentContexts::Entry before_;
};

/// The same for the library's own work, and for the pass that the thread drives. Its end restores what was
/// there before, whatever hooks left in force.
class WorkScope {
 public:
  explicit WorkScope(std::shared_ptr<ContextState> context, PassState* pass = nullptr);

 private:
  rpc::EnvironmentValuesScope before_;
};

}  // namespace torchspan::autograd
