#include "autograd/contexts/registry.h"

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

}  // namespace torchspan::autograd
