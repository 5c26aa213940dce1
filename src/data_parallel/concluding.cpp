#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <limits>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

#include "data_parallel/advice.h"
#include "data_parallel/reducer_impl.h"

/// The end of a round. The status is sent when the pass has nothing else left to wait for, in front of the
/// module or behind it, here or, in an autograd context, on other workers: so all ranks' passes succeed or
/// none. After a round that failed, all ranks count forwards from the same number again, and owe nothing for
/// earlier ones.
namespace torchspan::data_parallel {
namespace {

/// How much of a failure's text is told to the other ranks.
constexpr std::int64_t kReasonBytes = 512;
/// Below every number of forwards and its negative: says nothing in a maximum.
constexpr std::int32_t kNoNumber = std::numeric_limits<std::int32_t>::min();

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

void Reducer::Impl::decide(const RoundPtr& round, const engine::PassStatus& status) {
  {
    MutexLock lock(mutex_);
    if (round->aborted || round->concluding || round->sink == nullptr) return;
  }
  if (!status.ok()) return give_up(round, describe(status.error).text);
  conclude(round);
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
    round->over.emplace(host);
    round->concluded = true;
  }
  if (round->sink != nullptr) round->end->hold(round->finished);
  if (!round->status.valid()) return await_hooks(round, 0);
  round->status.add_done_callback([self = hold(), round](const Future<at::Tensor>&) { self->finish(round); });
}

void Reducer::Impl::await_hooks(const RoundPtr& round, std::size_t bucket) {
  const auto self = hold();
  if (bucket < round->works.size()) {
    round->works[bucket].add_done_callback(
        [self, round, bucket](const Future<at::Tensor>&) { self->await_hooks(round, bucket + 1); });
    return;
  }
  send_status(*round);
  round->status.add_done_callback([self, round](const Future<at::Tensor>&) { self->finish(round); });
}

void Reducer::Impl::send_status(Round& round) {
  if (hook_) check_hooks(round);
  {
    MutexLock lock(mutex_);
    round.forwards = forwards_;
    auto* status = status_.data_ptr<std::int32_t>();
    status[kStatusGaveUp] = round.aborted || round.failure ? group_.rank() + 1 : 0;
    status[kStatusForwards] = round.counts ? forwards_ : kNoNumber;
    status[kStatusMinusForwards] = round.counts ? -forwards_ : kNoNumber;
    for (std::size_t i = 0; tracks_use_ && i < count_; ++i)
      status[kStatusUsed + i] = round.sink != nullptr ? used_[i] : 0;
    if (round.sink != nullptr || round.aborted) std::fill(used_.begin(), used_.end(), 0);
  }
  try {
    round.status = group_.all_reduce(status_, collective::kMax);
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
    const auto* status = status_.data_ptr<std::int32_t>();
    const int who = status[kStatusGaveUp];
    const std::int32_t most = status[kStatusForwards];
    const bool apart = most != kNoNumber && most != -status[kStatusMinusForwards];
    if (who > 0 || apart) {
      MutexLock lock(mutex_);
      if (most != kNoNumber) forwards_ = most;  // the next ones are numbered alike again
      forget_forwards();
      if (!round->aborted) ++stats_.aborted;
    }
    if (who > 0) return hear_why(round, who - 1);
    if (apart) return hear_counts(round);
    for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
      buckets_->take(bucket, round->works[bucket].wait());
    }
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
    const Error placed(error.kind(),
                       fmt::format("in reduction {}, {}: {}", round.number, where, error.message()));
    promise.set_error(with_advice(Error(placed).with_worker(error.worker()).with_call(error.call())));
  } catch (...) {
    promise.set_error(std::current_exception());
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
  at::Tensor reason = at::zeros({kReasonBytes}, at::kByte);
  if (rank == group_.rank()) {
    const auto size = std::min<std::size_t>(round->reason.size(), kReasonBytes - 1);
    std::memcpy(reason.data_ptr(), round->reason.data(), size);
  }
  group_.broadcast(reason, rank)
      .add_done_callback([round, reason, world_rank = group_.ranks()[rank]](const Future<at::Tensor>& heard) {
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
}

void Reducer::Impl::hear_counts(const RoundPtr& round) {
  at::Tensor counts = at::full({group_.size()}, kNoNumber, at::kInt);
  if (round->counts) counts[group_.rank()] = round->forwards;
  group_.all_reduce(counts, collective::kMax)
      .add_done_callback([round, counts, ranks = group_.ranks()](const Future<at::Tensor>& heard) {
        if (heard.error()) return static_cast<void>(round->promise->set_error(heard.error()));
        const auto* count = counts.data_ptr<std::int32_t>();
        std::size_t fewest = ranks.size(), most = ranks.size();
        for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
          if (count[rank] == kNoNumber) continue;
          if (fewest == ranks.size() || count[rank] < count[fewest]) fewest = rank;
          if (most == ranks.size() || count[rank] > count[most]) most = rank;
        }
        round->promise->set_error(Error(
            ErrorKind::kInvalid,
            fmt::format("the ranks reduce gradients of different steps: rank {} has run {} reduced forwards "
                        "and rank {} has run {}, so the gradients of this step are void on all ranks. A rank "
                        "is ahead after a forward without a backward: an exception or a `continue` between "
                        "the two, or an evaluation without torch::NoGradGuard. The next forward counts as "
                        "the same one on all ranks",
                        ranks[most], count[most], ranks[fewest], count[fewest])));
      });
}

void Reducer::Impl::rebuild(const RoundPtr& round) {
  at::Tensor order = at::empty({static_cast<std::int64_t>(count_)}, at::kLong);
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
      .add_done_callback([self = hold(), round, order](const Future<at::Tensor>& agreed) {
        try {
          agreed.wait();
          self->build_in(round, order);
        } catch (...) {
          round->promise->set_error(std::current_exception());
        }
      });
}

/// All ranks take their new buckets, or none: one may have no memory for them beside the old ones.
void Reducer::Impl::build_in(const RoundPtr& round, const at::Tensor& order) {
  const at::NoGradGuard no_grad;
  const auto* first = order.data_ptr<std::int64_t>();
  std::string reason;
  try {
    round->rebuilt = make_buckets(std::vector<std::size_t>(first, first + count_));
  } catch (...) {
    reason = describe(std::current_exception()).text;
  }
  at::Tensor who = at::full({1}, round->rebuilt ? 0 : group_.rank() + 1, at::kInt);
  group_.all_reduce(who, collective::kMax)
      .add_done_callback([self = hold(), round, who, reason](const Future<at::Tensor>& told) {
        try {
          told.wait();
          const int unbuilt = *who.data_ptr<std::int32_t>();
          if (unbuilt > 0) {
            round->rebuilt.reset();
            self->note_unbuilt(unbuilt - 1, reason);
          }
          self->rebuilt_ = true;
          round->promise->set_value();
        } catch (...) {
          round->promise->set_error(std::current_exception());
        }
      });
}

void Reducer::Impl::note_unbuilt(int rank, const std::string& reason) {
  runtime_.log.warning(
      fmt::format("gradient buckets stay in the order of parameters, because rank {} cannot allocate others "
                  "beside them{}; training goes on, with less overlap. Give the group more memory, or set "
                  "rebuild_buckets to false",
                  group_.ranks()[static_cast<std::size_t>(rank)], reason.empty() ? "" : ": " + reason));
}

}  // namespace torchspan::data_parallel
