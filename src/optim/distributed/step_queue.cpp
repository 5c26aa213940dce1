#include "optim/distributed/step_queue.h"

#include <algorithm>

namespace torchspan::optim {

Future<Unit> StepQueue::run(Keys keys, UniqueFunction<void()> work) {
  auto job = std::make_shared<Job>(Job{std::move(keys), std::move(work), Promise<Unit>(continuations_)});
  Future<Unit> done = job->promise.future();
  {
    MutexLock lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  start_ready();
  return done;
}

std::vector<std::shared_ptr<StepQueue::Job>> StepQueue::take_ready() {
  std::vector<std::shared_ptr<Job>> ready;
  Keys taken;
  for (const auto& job : jobs_) {
    const bool free = std::none_of(job->keys.begin(), job->keys.end(),
                                   [&](const void* key) { return taken.contains(key); });
    taken.insert(job->keys.begin(), job->keys.end());
    if (job->running || !free) continue;
    job->running = true;
    ready.push_back(job);
  }
  return ready;
}

void StepQueue::start_ready() {
  std::vector<std::shared_ptr<Job>> ready;
  {
    MutexLock lock(mutex_);
    ready = take_ready();
  }
  auto continuations = continuations_.lock();
  for (const auto& job : ready) {
    auto run = [this, job] {
      // finish() releases the keys before the future completes.
      std::exception_ptr error;
      try {
        job->work();
      } catch (...) {
        error = std::current_exception();
      }
      finish(job);
      if (error) {
        job->promise.set_error(error);
      } else {
        job->promise.set_value();
      }
    };
    if (continuations) {
      continuations->post(run);
    } else {
      run();
    }
  }
}

void StepQueue::finish(const std::shared_ptr<Job>& job) {
  {
    MutexLock lock(mutex_);
    jobs_.remove(job);
  }
  start_ready();
}

}  // namespace torchspan::optim
