#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

#include "data_parallel/reducer_impl.h"

namespace torchspan::data_parallel {
namespace {

/// How much of a failure's text is told to the other ranks.
constexpr std::int64_t kReasonBytes = 512;

/// Half overflows when it is summed before it is divided.
bool may_divide_last(at::ScalarType dtype) { return dtype != at::kHalf && dtype != at::kComplexHalf; }

void check_reduced(const at::Tensor& reduced, const at::Tensor& sent, std::size_t bucket) {
  if (reduced.defined() && reduced.numel() == sent.numel() && reduced.is_sparse() == sent.is_sparse() &&
      reduced.scalar_type() == sent.scalar_type()) {
    return;
  }
  throw Error(
      ErrorKind::kInvalid,
      fmt::format(
          "the communication hook answered bucket {} with {}; it must answer with {} elements of {}", bucket,
          reduced.defined()
              ? fmt::format("{} elements of {}", reduced.numel(), c10::toString(reduced.scalar_type()))
              : "an undefined tensor",
          sent.numel(), c10::toString(sent.scalar_type())));
}

}  // namespace

bool Reducer::Impl::averages(const Round& round, std::size_t bucket) const {
  return !hook_ && round.divisor == group_.size() && may_divide_last(buckets_->dtype(bucket));
}

double Reducer::Impl::factor(const Round& round, std::size_t bucket) const {
  return hook_ || averages(round, bucket) ? 1 : 1 / round.divisor;
}

void Reducer::Impl::launch_full_buckets(const RoundPtr& round) {
  for (;;) {
    std::size_t bucket = 0;
    {
      MutexLock lock(mutex_);
      if (round->aborted || round->launching || round->next == buckets_->size()) return;
      if (round->pending[round->next] > 0) return;
      round->launching = true;
      bucket = round->next;
    }
    launch(*round, bucket);
    bool last = false;
    {
      MutexLock lock(mutex_);
      round->launching = false;
      last = ++round->next == buckets_->size();
    }
    if (last) return conclude(round);
  }
}

GradientBucket Reducer::Impl::as_hook_sees(const Round& round, std::size_t bucket) {
  GradientBucket seen;
  seen.index = bucket;
  seen.is_last = bucket + 1 == buckets_->size();
  seen.divisor = round.divisor;
  for (const std::size_t parameter : buckets_->parameters(bucket)) {
    seen.gradients.push_back(buckets_->view(parameter));
    seen.parameters.push_back(name(parameter));
    seen.parameter_tensors.push_back(tensor(parameter));
  }
  return seen;
}

void Reducer::Impl::launch(Round& round, std::size_t bucket) {
  const at::NoGradGuard no_grad;
  if (round.measured && bucket == 0) round.first_launch = runtime_.executor.now();
  round.broken = true;
  at::Tensor outgoing = buckets_->outgoing(bucket);
  Future<at::Tensor>& work = round.works[bucket];
  if (hook_) {
    GradientBucket seen = as_hook_sees(round, bucket);
    seen.buffer = outgoing;
    work = hook_(seen, group_);
    if (!work.valid()) {
      throw Error(ErrorKind::kInvalid,
                  fmt::format("the communication hook gave no future for bucket {}", bucket));
    }
  } else {
    work = group_.all_reduce(outgoing, averages(round, bucket) ? collective::kAverage : collective::kSum);
  }
  round.broken = false;
  if (!round.measured) return;
  work.then([self = hold(), bucket, number = round.number,
             began = runtime_.executor.now()](const Future<at::Tensor>&) {
    self->runtime_.spans.record(SpanKind::kBucket, fmt::format("bucket {}", bucket), began, number);
  });
}

void Reducer::Impl::conclude(const RoundPtr& round) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(round->concluding, true)) return;
  }
  if (round->measured && round->first_gradient)
    runtime_.spans.record(SpanKind::kBucket, "backward", *round->first_gradient, round->number);
  std::weak_ptr<FutureHost> host;
  for (const auto& work : round->works) {
    if (hook_ && host.expired()) host = work.host();
  }
  if (host.expired()) {  // no hook, or one that answers at once
    send_status(*round);
    host = round->status.host();
  }
  {
    MutexLock lock(mutex_);
    round->promise.emplace(host);
    round->finished = round->promise->future();
    round->concluded = true;
  }
  if (round->sink != nullptr) round->end->hold(round->finished);
  if (!round->status.valid()) return await_hooks(round, 0);
  round->status.then([self = hold(), round](const Future<at::Tensor>&) { self->finish(round); });
}

void Reducer::Impl::await_hooks(const RoundPtr& round, std::size_t bucket) {
  const auto self = hold();
  if (bucket < round->works.size()) {
    round->works[bucket].then(
        [self, round, bucket](const Future<at::Tensor>&) { self->await_hooks(round, bucket + 1); });
    return;
  }
  send_status(*round);
  round->status.then([self, round](const Future<at::Tensor>&) { self->finish(round); });
}

void Reducer::Impl::send_status(Round& round) {
  if (hook_) check_hooks(round);
  {
    MutexLock lock(mutex_);
    auto* status = status_.data_ptr<std::int32_t>();
    status[0] = round.aborted || round.failure ? group_.rank() + 1 : 0;
    for (std::size_t i = 0; tracks_use_ && i < count_; ++i)
      status[1 + i] = round.sink != nullptr ? used_[i] : 0;
    if (round.sink != nullptr || round.aborted) std::fill(used_.begin(), used_.end(), 0);
  }
  try {
    round.status = group_.all_reduce(status_, collective::kMaximum);
  } catch (...) {  // as if it had failed later: who waits for this round must not wait for ever
    round.status = make_failed_future<at::Tensor>(std::current_exception());
  }
}

void Reducer::Impl::check_hooks(Round& round) {
  try {
    for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
      const at::Tensor reduced = round.works[bucket].wait();
      if (!buckets_->sparse(bucket)) check_reduced(reduced, buckets_->buffer(bucket), bucket);
    }
  } catch (...) {
    round.failure = std::current_exception();
    if (!round.aborted) round.reason = describe(round.failure).text;
  }
}

void Reducer::Impl::finish(const RoundPtr& round) {
  try {
    const at::NoGradGuard no_grad;
    round->status.wait();
    const int who = status_.data_ptr<std::int32_t>()[0];
    if (who > 0) return hear_why(round, who - 1);
    for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
      buckets_->take(bucket, round->works[bucket].wait());
    }
    if (round->sink != nullptr) write_back(*round);
    count_finished(*round);
    const bool may_move =
        options_.rebuild_buckets && (options_.static_graph || !options_.find_unused_parameters);
    if (may_move && !rebuilt_) return rebuild(round);
    round->promise->set_value();
  } catch (...) {
    set_failure(*round);
  }
}

/// Of what is being thrown; failures of the group are told with the bucket that they befell.
void Reducer::Impl::set_failure(Round& round) {
  Promise<void>& promise = *round.promise;
  try {
    throw;
  } catch (const Error& error) {
    std::size_t bucket = 0;
    const auto failed = [](const Future<at::Tensor>& work) { return work.done() && work.error(); };
    while (bucket < round.works.size() && !failed(round.works[bucket])) ++bucket;
    if (!failed(round.status) && bucket == round.works.size()) {
      promise.set_error(error);
      return;
    }
    std::string where = "the flags of parameters";
    if (bucket < round.works.size()) {
      where = fmt::format("bucket {} of {} (with '{}')", bucket, round.works.size(),
                          name(buckets_->parameters(bucket)[0]));
    }
    Error placed(error.kind(), fmt::format("in reduction {}, {}: {}", round.number, where, error.message()));
    promise.set_error(placed.with_worker(error.worker()).with_call(error.call()));
  } catch (...) {
    promise.set_error(std::current_exception());
  }
}

void Reducer::Impl::write_back(Round& round) {
  const auto* status = status_.data_ptr<std::int32_t>();
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    const bool globally_unused = tracks_use_ && status[1 + slot % count_] == 0;
    if (!globally_unused) write_slot(round, slot);
  }
  for (const auto& [slot, gradient] : round.kept) {
    if (status[1 + slot % count_] != 0) continue;
    if (round.in_place) {
      const at::Tensor& view = buckets_->view(slot);
      view.copy_(gradient);
      round.sink->replace(tensor(slot), view);
    }
  }
}

void Reducer::Impl::write_slot(Round& round, std::size_t slot) {
  const at::Tensor& view = buckets_->view(slot);
  const at::Tensor gradient = round.sink->gradient(tensor(slot));
  if (buckets_->sparse(buckets_->bucket_of(slot))) {
    round.sink->replace(tensor(slot), view);
  } else if (round.in_place) {
    if (!buckets_->holds(slot, gradient)) round.sink->replace(tensor(slot), view);
  } else if (round.sink->writes_grad_field() && gradient.defined()) {
    gradient.copy_(view);
  } else {
    round.sink->replace(tensor(slot), view.clone());
  }
}

void Reducer::Impl::count_finished(Round& round) {
  const TimePoint now = runtime_.executor.now();
  if (round.measured && round.sink != nullptr) {
    runtime_.spans.record(SpanKind::kBucket, "reduction", round.first_launch, round.number);
  }
  MutexLock lock(mutex_);
  ++stats_.reductions;
  if (round.order.size() == count_ || round.delayed) {
    stats_.gradient_order.clear();
    for (const std::uint32_t parameter : round.order) stats_.gradient_order.push_back(name(parameter));
  }
  if (!round.measured || round.sink == nullptr) return;
  stats_.measured = round.number;
  stats_.backward = round.first_gradient ? round.last_gradient - *round.first_gradient : Duration::zero();
  stats_.communication = now - round.first_launch;
  stats_.overlap = std::max(Duration::zero(), std::min(round.last_gradient, now) - round.first_launch);
}

void Reducer::Impl::hear_why(const RoundPtr& round, int rank) {
  at::Tensor reason = group_.allocate({kReasonBytes}, at::kByte);
  reason.zero_();
  if (rank == group_.rank()) {
    const auto size = std::min<std::size_t>(round->reason.size(), kReasonBytes - 1);
    std::memcpy(reason.data_ptr(), round->reason.data(), size);
  }
  group_.broadcast(reason, rank)
      .then([round, reason, world_rank = group_.ranks()[rank]](const Future<at::Tensor>& heard) {
        if (round->failure) return static_cast<void>(round->promise->set_error(round->failure));
        if (heard.error()) return static_cast<void>(round->promise->set_error(heard.error()));
        const std::string text(static_cast<const char*>(reason.data_ptr()));
        round->promise->set_error(
            Error(ErrorKind::kRemoteFailure,
                  fmt::format(
                      "rank {} gave up its backward pass, so the gradients of this step are void on all "
                      "ranks: {}",
                      world_rank, text))
                .with_worker(fmt::format("rank {}", world_rank)));
      });
  MutexLock lock(mutex_);
  if (!round->aborted) ++stats_.aborted;
}

void Reducer::Impl::rebuild(const RoundPtr& round) {
  at::Tensor order = group_.allocate({static_cast<std::int64_t>(count_)}, at::kLong);
  std::vector<bool> placed(count_);
  auto* next = order.data_ptr<std::int64_t>();
  for (const std::uint32_t parameter : round->order) {
    placed[parameter] = true;
    *next++ = parameter;
  }
  for (std::size_t parameter = count_; parameter-- > 0;) {
    if (!placed[parameter]) *next++ = static_cast<std::int64_t>(parameter);
  }
  group_.broadcast(order, round->leader)
      .then([self = hold(), round, order](const Future<at::Tensor>& agreed) {
        try {
          agreed.wait();
          self->take_new_order(*round, order);
          round->promise->set_value();
        } catch (...) {
          round->promise->set_error(std::current_exception());
        }
      });
}

void Reducer::Impl::take_new_order(Round& round, const at::Tensor& order) {
  const at::NoGradGuard no_grad;
  const auto* first = order.data_ptr<std::int64_t>();
  const std::unique_ptr<Buckets> old = std::move(buckets_);
  build_buckets(std::vector<std::size_t>(first, first + count_));
  rebuilt_ = true;
  for (std::size_t slot = 0; round.in_place && slot < slots(); ++slot) {
    const at::Tensor gradient = round.sink->gradient(tensor(slot));
    if (!old->holds(slot, gradient)) continue;
    buckets_->put(slot, gradient, 1);
    round.sink->replace(tensor(slot), buckets_->view(slot));
  }
  MutexLock lock(mutex_);
  stats_.rebuilt = true;
}

void Reducer::Impl::give_up(const RoundPtr& round, const std::string& reason) {
  engine::GradientSink* sink = nullptr;
  {
    MutexLock lock(mutex_);
    if (round->concluding || std::exchange(round->aborted, true)) return;
    sink = std::exchange(round->sink, nullptr);
    if (round->reason.empty()) round->reason = reason;
    if (round_ == round) round_.reset();
    ++stats_.aborted;
  }
  try {
    if (sink != nullptr && round->in_place) leave_buckets(*sink);
    if (round->broken) throw Error(ErrorKind::kCancelled, round->reason);
    launch_the_rest_empty(round);
  } catch (...) {
    group_.abort(Error(ErrorKind::kCancelled, fmt::format("rank {} could not go on with its reduction: {}",
                                                          group_.ranks()[group_.rank()], round->reason)));
    return;
  }
  MutexLock lock(mutex_);
  given_up_ = round->finished;
}

void Reducer::Impl::leave_buckets(engine::GradientSink& sink) {
  const at::NoGradGuard no_grad;
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    if (!buckets_->holds(slot, sink.gradient(tensor(slot)))) continue;
    sink.replace(tensor(slot), at::zeros_like(buckets_->view(slot)));
  }
}

void Reducer::Impl::launch_the_rest_empty(const RoundPtr& round) {
  const at::NoGradGuard no_grad;
  for (; round->next < buckets_->size(); ++round->next) {
    for (const std::size_t parameter : buckets_->parameters(round->next)) {
      for (std::size_t replica = 0; replica < replicas_.size(); ++replica)
        buckets_->put_nothing(replica * count_ + parameter);
    }
    launch(*round, round->next);
  }
  conclude(round);
}

void Reducer::Impl::shadow(const ForwardOptions& options, const std::string& refusal) {
  settle();
  refuse_unfinished_round();
  RoundPtr round;
  {
    MutexLock lock(mutex_);
    round = new_round(options, nullptr);
    round->aborted = !refusal.empty();
    round->reason = refusal;
    if (round->aborted) ++stats_.aborted;
  }
  launch_the_rest_empty(round);
  try {
    round->finished.wait();
  } catch (const Error&) {
    if (!round->aborted) throw;
  }
}

}  // namespace torchspan::data_parallel
