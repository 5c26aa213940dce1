#include "autograd/contexts/context_lifetimes.h"

#include <utility>

#include <torchspan/core/future.h>

#include "autograd/messages/sending.h"
#include "autograd/passes/pass_state.h"
#include "core/api/throw_invalid.h"

namespace torchspan::autograd {
namespace {
constexpr int kCounterBits = 48;
constexpr std::uint64_t kCounter = (std::uint64_t{1} << kCounterBits) - 1;
}  // namespace

std::uint64_t Registry::next_id() {
  {
    MutexLock lock(mutex_);
    if (last_id_ != 0) return ++last_id_;
  }
  static_cast<void>(first_id());
  MutexLock lock(mutex_);
  return ++last_id_;
}

std::uint64_t Registry::first_id() {
  {
    MutexLock lock(mutex_);
    if (first_id_ != 0) return first_id_;
  }
  const GlobalId first = first_();  // rank and incarnation are known once the worker has joined
  MutexLock lock(mutex_);
  if (first_id_ == 0)
    first_id_ = last_id_ = (std::uint64_t{first.worker} << kCounterBits) | (first.local & kCounter);
  return first_id_;
}

bool Registry::is_of_former_process(std::uint64_t id) {
  const std::uint64_t first = first_id();
  return maker_of(id) == maker_of(first) && id < first;
}

std::shared_ptr<ContextState> Registry::create() {
  auto state = make_process_shared<ContextState>(next_id(), worker_, copies_);
  MutexLock lock(mutex_);
  contexts_.emplace(state->id(), state);
  return state;
}

std::shared_ptr<ContextState> Registry::find_or_create(std::uint64_t id) {
  MutexLock lock(mutex_);
  if (ended_.contains(id)) return nullptr;
  auto& state = contexts_[id];
  if (!state) state = make_process_shared<ContextState>(id, worker_, copies_);
  return state;
}

std::shared_ptr<ContextState> Registry::find(std::uint64_t id) const {
  MutexLock lock(mutex_);
  auto it = contexts_.find(id);
  return it == contexts_.end() ? nullptr : it->second;
}

std::shared_ptr<ContextState> Registry::remove(std::uint64_t id) {
  MutexLock lock(mutex_);
  if (ended_.insert(id).second) {
    ended_order_.push_back(id);
    if (ended_order_.size() > kRemembered) {
      ended_.erase(ended_order_.front());
      ended_order_.pop_front();
    }
  }
  auto it = contexts_.find(id);
  if (it == contexts_.end()) return nullptr;
  auto state = std::move(it->second);
  contexts_.erase(it);
  return state;
}

std::size_t Registry::remembered() const {
  MutexLock lock(mutex_);
  return ended_.size();
}

std::vector<std::shared_ptr<ContextState>> Registry::all() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<ContextState>> states;
  for (const auto& [id, state] : contexts_) states.push_back(state);
  return states;
}

void ContextLifetimes::serve(rpc::Registrar& registrar) {
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kPool, &ContextLifetimes::release_notified);
  registrar.handle<AdoptMember>(
      rpc::RunOn::kPool, [weak = weak_from_this()](const rpc::CallInfo& call, const AdoptMember& message) {
        return require_alive(weak)->adopt(call, message);
      });
  registrar.on_shutdown([weak = weak_from_this()] { return require_alive(weak)->releases_under_way(); });
}

std::shared_ptr<ContextState> ContextLifetimes::join(std::uint64_t id, std::uint32_t peer) {
  auto context = registry_->find_or_create(id);
  const auto added = context ? context->add_worker(peer) : ContextState::Added::kEnded;
  if (added == ContextState::Added::kEnded) {
    throw_invalid("autograd context {:#x} has ended, so a request in it arrived too late", id);
  }
  if (added == ContextState::Added::kNow) add_peer(context, peer);
  return context;
}

void ContextLifetimes::add_peer(const std::shared_ptr<ContextState>& context, std::uint32_t peer) {
  const auto backend = worker_.backend();
  if (backend && !backend->is_present(peer)) peer_departed(context);
}

void ContextLifetimes::worker_departed(std::vector<std::shared_ptr<ContextState>> contexts,
                                       std::uint32_t rank) {
  const auto pool = worker_.continuations().lock();
  if (!pool) return;
  pool->post([self = shared_from_this(), contexts = std::move(contexts), rank] {
    if (!self->worker_.backend()) return;
    for (const auto& context : contexts) {
      if (context->workers().contains(rank) || maker_of(context->id()) == rank) self->peer_departed(context);
    }
  });
}

/// A worker that this one communicated with in the context is gone.
void ContextLifetimes::peer_departed(const std::shared_ptr<ContextState>& context) {
  const Worker me = worker_.require();
  const std::uint32_t maker = maker_of(context->id());
  if (maker == me.backend()->self().rank) return;
  const auto release_soon = [weak = weak_from_this(), id = context->id()] {
    const auto self = weak.lock();
    const auto pool = self ? self->worker_.continuations().lock() : nullptr;
    if (pool) pool->post([self, id] { static_cast<void>(self->release(id)); });
  };
  if (!me.backend()->is_present(maker)) return release_soon();
  const auto request = std::make_shared<Notification<AdoptMember>>(me, maker, AdoptMember{context->id()},
                                                                   [release_soon](bool known) {
                                                                     if (!known) release_soon();
                                                                   });
  static_cast<void>(request->start());
}

bool ContextLifetimes::adopt(const rpc::CallInfo& call, const AdoptMember& message) {
  auto context = registry_->find(message.context);
  return context && context->add_worker(call.peer) != ContextState::Added::kEnded;
}

Future<void> ContextLifetimes::release(std::uint64_t id) {
  auto context = registry_->remove(id);
  if (!context || !context->release()) return make_ready_future<void>();
  if (auto pass = context->pass()) {
    pass->ending().fail_here(
        Error(ErrorKind::kCancelled, "the autograd context was released while its backward pass ran"));
  }
  auto backend = worker_.backend();
  if (!backend) return make_ready_future<void>();
  Future<void> notified = notify_all(Worker(backend), *context, ReleaseContext{id});
  MutexLock lock(mutex_);
  std::erase_if(releases_, [](const auto& release) { return release.second.done(); });
  releases_.emplace(id, notified);
  return notified;
}

Future<void> ContextLifetimes::released(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = releases_.find(id);
  return found == releases_.end() ? make_ready_future<void>() : found->second;
}

void ContextLifetimes::release_notified(std::uint32_t, ReleaseContext message,
                                        Answer<ReleaseContext> answer) {
  const Future<void> notified = release(message.context);
  if (notified.done()) return answer.give(Unit{});
  notified.add_done_callback([answer = std::make_shared<Answer<ReleaseContext>>(std::move(answer))](
                                 const Future<void>&) { answer->give(Unit{}); });
}

Future<void> ContextLifetimes::releases_under_way() {
  std::vector<Future<void>> all;
  MutexLock lock(mutex_);
  for (const auto& [context, release] : releases_) all.push_back(release);
  return when_all(std::move(all));
}

}  // namespace torchspan::autograd
