#include "autograd/state.h"

#include <fmt/format.h>

#include "autograd/pass.h"

namespace torchspan::autograd {

void ContextState::add_send(const std::shared_ptr<SendNode>& send) {
  MutexLock lock(mutex_);
  sends_.emplace(send->message(), send);
}

void ContextState::remove_send(std::uint64_t message) {
  std::shared_ptr<SendNode> gone;  // its graph is destroyed after the lock
  MutexLock lock(mutex_);
  auto it = sends_.find(message);
  if (it == sends_.end()) return;
  gone = std::move(it->second);
  sends_.erase(it);
}

std::shared_ptr<SendNode> ContextState::find_send(std::uint64_t message) const {
  MutexLock lock(mutex_);
  auto it = sends_.find(message);
  return it == sends_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<SendNode>> ContextState::sends() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<SendNode>> all;
  for (const auto& [message, send] : sends_) all.push_back(send);
  return all;
}

void ContextState::remove_sends(const std::vector<std::shared_ptr<SendNode>>& sends) {
  for (const auto& send : sends) remove_send(send->message());
}

void ContextState::add_worker(std::uint32_t rank) {
  MutexLock lock(mutex_);
  workers_.insert(rank);
}

std::set<std::uint32_t> ContextState::workers() const {
  MutexLock lock(mutex_);
  return workers_;
}

std::shared_ptr<PassState> ContextState::pass() const {
  MutexLock lock(mutex_);
  return pass_;
}

bool ContextState::begin_pass(const std::shared_ptr<PassState>& pass) {
  MutexLock lock(mutex_);
  if (auto it = aborted_.find(pass->id()); it != aborted_.end()) {
    throw Error(ErrorKind::kCancelled, fmt::format("the backward pass was aborted: {}", it->second));
  }
  if (released_) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("autograd context {:#x} was released; make a new Context for the "
                            "next step",
                            id_));
  }
  if (pass_) return false;
  pass_ = pass;
  return true;
}

void ContextState::end_pass(const PassState& pass) {
  std::shared_ptr<PassState> gone;
  MutexLock lock(mutex_);
  if (pass_.get() == &pass) gone = std::move(pass_);
}

void ContextState::remember_aborted(std::uint64_t pass, const std::string& reason) {
  MutexLock lock(mutex_);
  aborted_.emplace(pass, reason);
}

bool ContextState::release() {
  MutexLock lock(mutex_);
  return !std::exchange(released_, true);
}

}  // namespace torchspan::autograd
