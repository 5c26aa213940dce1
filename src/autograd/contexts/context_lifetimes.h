#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/context_state.h"
#include "autograd/contexts/registry.h"
#include "autograd/messages/answer.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/weak_worker.h"

namespace torchspan::autograd {

/// Joins and releases contexts on this worker, and notifies the workers that it communicated with in them.
/// A context whose creator is gone is released; if another participant is gone, the creator is asked to
/// notify this worker of the context's end. Thread-safe.
class ContextLifetimes : public std::enable_shared_from_this<ContextLifetimes> {
 public:
  ContextLifetimes(WeakWorker worker, std::shared_ptr<Registry> registry)
      : worker_(std::move(worker)), registry_(std::move(registry)) {}
  void serve(rpc::Registrar& registrar);

  /// Takes part in a context that `peer` works in; see AutogradExtension::join().
  std::shared_ptr<ContextState> join(std::uint64_t id, std::uint32_t peer);
  /// A message of `peer` was the first in `context` from it. The peer may be gone already.
  void add_peer(const std::shared_ptr<ContextState>& context, std::uint32_t peer);
  /// A worker has died or left. `contexts` are those of this worker at that time.
  void worker_gone(std::vector<std::shared_ptr<ContextState>> contexts, std::uint32_t rank);
  /// Completes when all participants have released the context; at once if it was released here before, so
  /// that workers that notify each other do not wait for each other.
  Future<void> release(std::uint64_t id);
  /// Completes when an earlier release() of this context does.
  Future<void> released(std::uint64_t id);

 private:
  void release_notified(std::uint32_t peer, ReleaseContext message, Answer<ReleaseContext> answer);
  Future<void> releases_under_way();
  bool adopt(const rpc::CallInfo& call, const AdoptMember& message);
  void lost_peer(const std::shared_ptr<ContextState>& context);

  const WeakWorker worker_;
  const std::shared_ptr<Registry> registry_;
  Mutex mutex_;
  std::map<std::uint64_t, Future<void>> releases_ TORCHSPAN_GUARDED_BY(mutex_);  // under way, by context
};

}  // namespace torchspan::autograd
