#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

#include "data_parallel/reducer_impl.h"

namespace torchspan::data_parallel {
namespace {

/// Half overflows when it is summed before it is divided.
bool may_divide_last(at::ScalarType dtype) { return dtype != at::kHalf && dtype != at::kComplexHalf; }

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
    MutexLock lock(mutex_);
    round->launching = false;
    ++round->next;
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
    work = group_.all_reduce(outgoing, averages(round, bucket) ? collective::kAvg : collective::kSum);
  }
  round.broken = false;
  if (!round.measured) return;
  work.add_done_callback([self = hold(), bucket, number = round.number,
                          began = runtime_.executor.now()](const Future<at::Tensor>&) {
    self->runtime_.spans.record(SpanKind::kBucket, fmt::format("bucket {}", bucket), began, number);
  });
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
    forget_forwards();
  }
  try {
    if (sink != nullptr && round->in_place) leave_buckets(*sink, /*keep=*/false);
  } catch (...) {  // gradients would be written to by the others' reduction
    round->broken = true;
  }
  end_without_us(round);
}

void Reducer::Impl::end_without_us(const RoundPtr& round) {
  try {
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

void Reducer::Impl::leave_buckets(engine::GradientSink& sink, bool keep) {
  const at::NoGradGuard no_grad;
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    const at::Tensor gradient = sink.gradient(tensor(slot));
    if (!buckets_->holds(slot, gradient)) continue;
    sink.replace(tensor(slot), keep ? gradient.clone() : at::zeros_like(buckets_->view(slot)));
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

Reducer::Impl::RoundPtr Reducer::Impl::round_without_pass(const ForwardOptions& options,
                                                          const std::string& refusal) {
  engine::GradFieldSink here(0);  // where gradients are between passes
  leave_buckets(here, /*keep=*/true);
  MutexLock lock(mutex_);
  RoundPtr round = new_round(options, nullptr);
  round->aborted = !refusal.empty();
  round->reason = refusal;
  if (!round->aborted) return round;
  ++stats_.aborted;
  forget_forwards();
  return round;
}

void Reducer::Impl::shadow(const ForwardOptions& options) {
  settle();
  refuse_unfinished_round();
  const RoundPtr round = round_without_pass(options, "");
  round->counts = false;
  launch_the_rest_empty(round);
  round->finished.wait();
  move_into_rebuilt(*round);
}

void Reducer::Impl::refuse(const ForwardOptions& options, const std::string& reason) {
  settle();
  RoundPtr unfinished;
  {
    MutexLock lock(mutex_);
    if (round_ && !round_->concluded && round_->sink == nullptr) unfinished = round_;
  }
  if (unfinished) {
    give_up(unfinished, reason);
    settle();
  }
  end_without_us(round_without_pass(options, reason));
}

}  // namespace torchspan::data_parallel
