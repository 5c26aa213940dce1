#include "autograd/contexts/context_sends.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::autograd {

void ContextSends::add(const SendNodePtr& send, std::optional<std::uint64_t> call) {
  MutexLock lock(mutex_);
  if (closed_ || !sends_.emplace(send->message().id, Listed{send, added_, call}).second) return;
  ++added_;
  if (call) unanswered_.insert(*call);
  uncounted_.insert(send->message().id);
}

void ContextSends::call_answered(std::uint64_t call) {
  MutexLock lock(mutex_);
  unanswered_.erase(call);
}

bool ContextSends::is_unanswered(std::uint64_t message) const {
  MutexLock lock(mutex_);
  const auto found = sends_.find(message);
  return found != sends_.end() && found->second.call && unanswered_.contains(*found->second.call);
}

PassSends ContextSends::count() {
  std::vector<SendNodePtr> fresh;  // destroyed, with their graphs, after the lock is released
  PassSends sends;
  {
    MutexLock lock(mutex_);
    sends.count = sends_.size();
    sends.end = added_;
    for (const std::uint64_t message : std::exchange(uncounted_, {})) {
      fresh.push_back(sends_.at(message).send);
    }
  }
  for (const auto& send : fresh) sends.counted += edges_->add(send);
  return sends;
}

std::vector<MessageInfo> ContextSends::messages(std::uint64_t end) const {
  std::vector<MessageInfo> messages;
  MutexLock lock(mutex_);
  for (const auto& [message, listed] : sends_) {
    if (listed.number < end) messages.push_back(listed.send->message());
  }
  return messages;
}

std::set<std::string> ContextSends::calls_to(std::uint32_t rank) const {
  std::set<std::string> calls;
  MutexLock lock(mutex_);
  for (const auto& [message, listed] : sends_) {
    if (listed.send->message().peer == rank) calls.insert(listed.send->message().text());
  }
  return calls;
}

/// The caller destroys the result after the lock is released, because its graph may be destroyed with it.
SendNodePtr ContextSends::take_out(std::uint64_t message) {
  auto it = sends_.find(message);
  if (it == sends_.end()) return nullptr;
  auto send = std::move(it->second.send);
  if (it->second.call) unanswered_.erase(*it->second.call);
  sends_.erase(it);
  uncounted_.erase(message);
  return send;
}

void ContextSends::remove(std::uint64_t message) {
  SendNodePtr gone;
  MutexLock lock(mutex_);
  gone = take_out(message);
}

SendNodePtr ContextSends::use(const SendNode& send) {
  MutexLock lock(mutex_);
  if (std::find(used_.begin(), used_.end(), send.message().id) != used_.end()) return nullptr;
  used_.push_back(send.message().id);
  if (used_.size() <= kUsed) return nullptr;
  SendNodePtr gone = take_out(used_.front());
  used_.pop_front();
  if (gone) remember_used_up(gone->message());
  return gone;
}

void ContextSends::use_up(const SendNode& send) {
  SendNodePtr gone;
  MutexLock lock(mutex_);
  gone = take_out(send.message().id);
  if (gone) remember_used_up(gone->message());
}

void ContextSends::remember_used_up(const MessageInfo& message) {
  used_up_.push_back(message);
  if (used_up_.size() > kUsedUp) used_up_.pop_front();
}

SendNodePtr ContextSends::find(std::uint64_t message, std::uint64_t end) const {
  MutexLock lock(mutex_);
  if (auto it = sends_.find(message); it != sends_.end() && it->second.number < end) return it->second.send;
  const auto used = std::find_if(used_up_.begin(), used_up_.end(),
                                 [&](const MessageInfo& info) { return info.id == message; });
  if (used != used_up_.end()) {
    throw Error(ErrorKind::kInvalid, fmt::format("the graph behind {} was used up by an earlier pass; set "
                                                 "BackwardOptions::retain_graph for that pass",
                                                 used->text()));
  }
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("this context did not send message {:#x}, or an earlier pass used up its graph; in that "
                  "case set BackwardOptions::retain_graph for that pass",
                  message));
}

std::vector<SendNodePtr> ContextSends::all() const {
  MutexLock lock(mutex_);
  std::vector<SendNodePtr> all;
  for (const auto& [message, listed] : sends_) all.push_back(listed.send);
  return all;
}

std::vector<SendNodePtr> ContextSends::unused() const {
  MutexLock lock(mutex_);
  std::vector<SendNodePtr> unused;
  for (const auto& [message, listed] : sends_) {
    if (std::find(used_.begin(), used_.end(), message) == used_.end()) unused.push_back(listed.send);
  }
  return unused;
}

std::vector<SendNodePtr> ContextSends::use_up_used() {
  std::vector<SendNodePtr> gone;
  MutexLock lock(mutex_);
  for (const std::uint64_t message : std::exchange(used_, {})) {
    gone.push_back(take_out(message));
    if (gone.back()) remember_used_up(gone.back()->message());
  }
  return gone;
}

void ContextSends::close() {
  std::map<std::uint64_t, Listed> gone;
  MutexLock lock(mutex_);
  closed_ = true;
  gone.swap(sends_);
  uncounted_.clear();
}

}  // namespace torchspan::autograd
