#include "data_parallel/buckets/bucket_launcher.h"

#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

namespace torchspan::data_parallel {

BucketLauncher::BucketLauncher(Parts parts, std::shared_ptr<Buckets> buckets, double divisor)
    : slots_(parts.slots),
      reducer_(parts.reducer),
      stream_(parts.stream),
      buckets_(std::move(buckets)),
      divisor_(divisor),
      works_(buckets_->size()),
      producers_(buckets_->size()) {
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket)
    pending_.push_back(buckets_->parameters(bucket).size() * slots_.replicas().size());
}

double BucketLauncher::factor(std::size_t bucket) const {
  return reducer_.factor(buckets_->dtype(bucket), divisor_);
}

void BucketLauncher::filled(std::size_t bucket, const std::function<void()>& complete) {
  const auto stream = stream_.current();
  {
    MutexLock lock(mutex_);
    if (stream) producers_[bucket].add(*stream);
    if (pending_[bucket] > 1) return static_cast<void>(--pending_[bucket]);
  }
  complete();
  MutexLock lock(mutex_);
  pending_[bucket] = 0;
  producers_[bucket].record(stream_.events());
}

void BucketLauncher::wait_for_producers(std::size_t bucket) {
  MutexLock lock(mutex_);
  producers_[bucket].wait(*stream_.events());
}

void BucketLauncher::launch_full(RoundTimer& timer) {
  for (;;) {
    std::size_t bucket = 0;
    {
      MutexLock lock(mutex_);
      if (stopped_ || launching_ || next_ == buckets_->size()) return;
      if (pending_[next_] > 0) return;
      launching_ = true;
      bucket = next_;
    }
    launch(bucket, timer);
    MutexLock lock(mutex_);
    launching_ = false;
    ++next_;
  }
}

void BucketLauncher::stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
}

void BucketLauncher::launch_zeros(RoundTimer& timer) {
  const at::NoGradGuard no_grad;
  const StreamScope on_stream(stream_.stream());
  std::size_t bucket = 0;
  {
    MutexLock lock(mutex_);
    bucket = next_;
  }
  for (; bucket < buckets_->size(); ++bucket) {
    wait_for_producers(bucket);
    for (const std::size_t parameter : buckets_->parameters(bucket)) {
      for (std::size_t replica = 0; replica < slots_.replicas().size(); ++replica)
        buckets_->put_nothing(replica * slots_.count() + parameter);
    }
    launch(bucket, timer);
    MutexLock lock(mutex_);
    next_ = bucket + 1;
  }
}

void BucketLauncher::launch(std::size_t bucket, RoundTimer& timer) {
  const at::NoGradGuard no_grad;
  if (bucket == 0) timer.launches_begin();
  bool given_up = false;
  {
    MutexLock lock(mutex_);
    broken_ = true;  // unless the launch succeeds
    given_up = stopped_;
  }
  const StreamScope on_stream(stream_.stream());
  wait_for_producers(bucket);
  works_[bucket] = reducer_.reduce(*buckets_, bucket, {divisor_, given_up});
  {
    MutexLock lock(mutex_);
    broken_ = false;
  }
  timer.launched(bucket, buckets_->bytes(bucket), works_[bucket]);
}

bool BucketLauncher::is_broken() const {
  MutexLock lock(mutex_);
  return broken_;
}

void BucketLauncher::set_broken() {
  MutexLock lock(mutex_);
  broken_ = true;
}

std::weak_ptr<FutureHost> BucketLauncher::hook_host() const {
  std::weak_ptr<FutureHost> host;
  for (const auto& work : works_) {
    if (reducer_.has_hook() && host.expired()) host = work.host();
  }
  return host;
}

void BucketLauncher::check_hook_results() const {
  if (!reducer_.has_hook()) return;
  const StreamScope on_stream(stream_.stream());
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket)
    reducer_.check(*buckets_, bucket, works_[bucket].wait());
}

void BucketLauncher::take_results() {
  const StreamScope on_stream(stream_.stream());
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket)
    buckets_->take(bucket, works_[bucket].wait());
}

std::shared_ptr<const ValueGate> BucketLauncher::gate() const {
  std::vector<std::shared_ptr<const ValueGate>> gates;
  for (const auto& work : works_) gates.push_back(work.gate());
  return stream_.gate(std::move(gates));
}

std::string BucketLauncher::failed_bucket() const {
  for (std::size_t bucket = 0; bucket < works_.size(); ++bucket) {
    if (!works_[bucket].done() || !works_[bucket].error()) continue;
    return fmt::format("bucket {} of {} (with '{}')", bucket, works_.size(),
                       slots_.name(buckets_->parameters(bucket)[0]));
  }
  return {};
}

}  // namespace torchspan::data_parallel
