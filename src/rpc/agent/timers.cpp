#include "rpc/agent/timers.h"

#include <vector>

namespace torchspan::rpc {

Timers::Added Timers::at(Deadline when, UniqueFunction<void()> job) {
  MutexLock lock(mutex_);
  const Id id{when, ++counter_};
  if (closed_) return {id, false};
  const auto place = jobs_.emplace(id, std::move(job)).first;
  return {id, place == jobs_.begin()};
}

void Timers::cancel(const Id& id) {
  UniqueFunction<void()> job;  // its captures are destroyed outside the lock
  MutexLock lock(mutex_);
  auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  job = std::move(found->second);
  jobs_.erase(found);
}

void Timers::run_due(TimePoint now) {
  std::vector<UniqueFunction<void()>> due;
  {
    MutexLock lock(mutex_);
    while (!jobs_.empty() && jobs_.begin()->first.when.passed(now)) {
      due.push_back(std::move(jobs_.begin()->second));
      jobs_.erase(jobs_.begin());
    }
  }
  for (auto& job : due) job();
}

void Timers::close() {
  std::map<Id, UniqueFunction<void()>> dropped;  // their captures are destroyed outside the lock
  MutexLock lock(mutex_);
  closed_ = true;
  dropped.swap(jobs_);
}

Deadline Timers::next() const {
  MutexLock lock(mutex_);
  return jobs_.empty() ? Deadline::never() : jobs_.begin()->first.when;
}

}  // namespace torchspan::rpc
