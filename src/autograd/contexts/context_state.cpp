#include "autograd/contexts/context_state.h"

#include <algorithm>
#include <fmt/format.h>

#include "autograd/passes/pass_state.h"

namespace torchspan::autograd {

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

bool ContextState::clear_gradients() {
  MutexLock changing(changing_);
  {
    MutexLock lock(mutex_);
    if (pass_) return false;
  }
  gradients_.clear();
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

bool ContextState::drop_running(std::shared_ptr<PassOwner>& pass) const {
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
    throw Error(ErrorKind::kInvalid,
                fmt::format("autograd context {:#x} was released; create a new Context for the "
                            "next step",
                            id_));
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
