#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/copies.h>
#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"

namespace torchspan::autograd {

/// The contexts that one worker knows, and the ids of those that ended, so that late messages do not recreate
/// them. Thread-safe.
class Registry {
 public:
  /// `first` returns an id of this worker that is greater than those of earlier processes with its rank.
  Registry(std::string worker, std::function<GlobalId()> first)
      : worker_(std::make_shared<const std::string>(std::move(worker))), first_(std::move(first)) {}
  /// ContextState::worker() of all contexts in this registry.
  const void* worker() const { return worker_.get(); }
  const std::string& worker_name() const { return *worker_; }
  /// How this worker's passes copy gradients to devices; and their events.
  const std::shared_ptr<device::CopyStreams>& copies() const { return copies_; }

  /// A new id. Ids increase, also when another process replaces a worker that died.
  std::uint64_t next_id();
  /// Whether an earlier process with this worker's rank made `id`: it belongs to a graph that ended with that process.
  bool is_of_former_process(std::uint64_t id);
  std::shared_ptr<ContextState> create();
  /// A context that another worker created; null if it was released before.
  std::shared_ptr<ContextState> find_or_create(std::uint64_t id);
  std::shared_ptr<ContextState> find(std::uint64_t id) const;
  /// Removes a context and remembers that it has ended. Null if it is unknown.
  std::shared_ptr<ContextState> remove(std::uint64_t id);
  std::vector<std::shared_ptr<ContextState>> all() const;
  /// How many ids of ended contexts are kept.
  std::size_t remembered() const;

 private:
  /// Messages may be late by thousands of passes.
  static constexpr std::size_t kRemembered = 1 << 16;

  /// Greater than the ids of earlier processes with this rank, and less than those of this one.
  std::uint64_t first_id();

  const std::shared_ptr<const std::string> worker_;
  const std::function<GlobalId()> first_;
  const std::shared_ptr<device::CopyStreams> copies_ = std::make_shared<device::CopyStreams>();
  mutable Mutex mutex_;
  std::uint64_t first_id_ TORCHSPAN_GUARDED_BY(mutex_) = 0, last_id_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, std::shared_ptr<ContextState>> contexts_ TORCHSPAN_GUARDED_BY(mutex_);
  std::set<std::uint64_t> ended_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::uint64_t> ended_order_ TORCHSPAN_GUARDED_BY(mutex_);
};

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
  void worker_departed(std::vector<std::shared_ptr<ContextState>> contexts, std::uint32_t rank);
  /// Completes when all participants have released the context; at once if it was released here before, so
  /// that workers that notify each other do not wait for each other.
  Future<void> release(std::uint64_t id);
  /// Completes when an earlier release() of this context does.
  Future<void> released(std::uint64_t id);

 private:
  void release_notified(std::uint32_t peer, ReleaseContext message, Answer<ReleaseContext> answer);
  Future<void> releases_under_way();
  bool adopt(const rpc::CallInfo& call, const AdoptMember& message);
  void peer_departed(const std::shared_ptr<ContextState>& context);

  const WeakWorker worker_;
  const std::shared_ptr<Registry> registry_;
  Mutex mutex_;
  std::map<std::uint64_t, Future<void>> releases_ TORCHSPAN_GUARDED_BY(mutex_);  // under way, by context
};

}  // namespace torchspan::autograd
