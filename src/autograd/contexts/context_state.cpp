#include "autograd/contexts/context_state.h"

#include <algorithm>
#include <utility>

#include <torchspan/core/error.h>

#include "autograd/passes/pass_state.h"
#include "core/api/throw_invalid.h"

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
    throw_invalid(
        "the graph behind {} was used up by an earlier pass; set BackwardOptions::retain_graph for that pass",
        used->text());
  }
  throw_invalid(
      "this context did not send message {:#x}, or an earlier pass used up its graph; in that case set "
      "BackwardOptions::retain_graph for that pass",
      message);
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

void ContextState::add_taker(GradientTaker taker) {
  auto shared = std::make_shared<const GradientTaker>(std::move(taker));
  MutexLock lock(mutex_);
  takers_.push_back(std::move(shared));
}

std::optional<Future<void>> ContextState::offer(std::uint64_t pass, const at::Tensor& parameter,
                                                at::Tensor& gradient) const {
  std::vector<std::shared_ptr<const GradientTaker>> takers;
  {
    MutexLock lock(mutex_);
    takers = takers_;
  }
  if (takers.empty()) return std::nullopt;
  const PassRuns runs = [context = weak_from_this(), pass] {
    const auto alive = context.lock();
    return alive && alive->runs(pass);
  };
  for (const auto& taker : takers) {
    if (auto taken = (*taker)(parameter, gradient, runs)) return taken;
  }
  return std::nullopt;
}

void ContextState::change_gradients(std::uint64_t pass,
                                    const std::function<void(engine::GradientMap&)>& change) {
  MutexLock changing(changing_);
  if (runs(pass)) change(gradients_);
}

bool ContextState::runs(std::uint64_t pass) const {
  MutexLock lock(mutex_);
  return pass_ && pass_->id() == pass;
}

bool ContextState::change_gradients(const std::function<void(engine::GradientMap&)>& change) {
  MutexLock changing(changing_);
  {
    MutexLock lock(mutex_);
    if (pass_) return false;
  }
  change(gradients_);
  return true;
}

ContextState::Added ContextState::add_worker(std::uint32_t rank) {
  MutexLock lock(mutex_);
  if (released_) return Added::kEnded;
  return workers_.insert(rank).second ? Added::kNow : Added::kBefore;
}

std::set<std::uint32_t> ContextState::workers() const {
  MutexLock lock(mutex_);
  return workers_;
}

bool ContextState::is_first_of(std::uint64_t wave) {
  MutexLock lock(mutex_);
  if (std::find(waves_.begin(), waves_.end(), wave) != waves_.end()) return false;
  waves_.push_back(wave);
  if (waves_.size() > kWaves) waves_.pop_front();
  return true;
}

std::shared_ptr<PassState> ContextState::pass() const {
  MutexLock lock(mutex_);
  return pass_;
}

bool ContextState::drop_running(std::shared_ptr<PassState>& pass) const {
  MutexLock lock(mutex_);
  if (!pass_ || pass_ != pass) return false;
  pass.reset();
  return true;
}

void ContextState::begin_pass(const std::shared_ptr<PassState>& pass) {
  MutexLock lock(mutex_);
  const auto ended = ended_.find(maker_of(pass->id()));
  if (ended != ended_.end() && pass->id() <= ended->second.pass) {
    if (ended->second.pass == pass->id() && ended->second.failure) throw Error(*ended->second.failure);
    throw Error(ErrorKind::kCancelled, "this backward pass has ended on this worker");
  }
  for (const auto& [refused, failure] : refused_) {
    if (refused == pass->id()) throw Error(failure);
  }
  if (released_) {
    throw_invalid("autograd context {:#x} was released; create a new Context for the next step", id_);
  }
  pass_ = pass;
}

void ContextState::end_pass(std::uint64_t pass, const PassWork& work, const std::optional<Error>& failure,
                            Future<void> notified) {
  std::shared_ptr<PassState> gone;
  MutexLock lock(mutex_);
  if (pass_ && pass_->id() == pass) gone = std::move(pass_);
  Ended& ended = ended_[maker_of(pass)];
  std::erase_if(ended.notified, [](const Future<void>& earlier) { return earlier.done(); });
  if (notified.valid()) ended.notified.push_back(std::move(notified));
  if (ended.pass < pass) ended = {pass, work, failure, std::move(ended.notified)};
}

void ContextState::refuse_pass(std::uint64_t pass, const Error& failure) {
  MutexLock lock(mutex_);
  refused_.emplace_back(pass, failure);
  if (refused_.size() > kRefused) refused_.pop_front();
}

std::optional<PassWork> ContextState::ended_pass(std::uint64_t pass) const {
  MutexLock lock(mutex_);
  const auto ended = ended_.find(maker_of(pass));
  if (ended == ended_.end() || ended->second.pass != pass) return std::nullopt;
  return ended->second.work;
}

Future<void> ContextState::failures_notified() const {
  std::vector<Future<void>> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [root, ended] : ended_) {
      std::ranges::copy_if(ended.notified, std::back_inserter(all),
                           [](const Future<void>& one) { return !one.done(); });
    }
  }
  return when_all(std::move(all));
}

bool ContextState::saw_pass() const {
  MutexLock lock(mutex_);
  return pass_ != nullptr || !ended_.empty() || !refused_.empty();
}

bool ContextState::release() {
  {
    MutexLock lock(mutex_);
    if (std::exchange(released_, true)) return false;
  }
  sends_.close();
  return true;
}

}  // namespace torchspan::autograd
