#include "data_parallel/rounds/status_exchange.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <limits>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

// Positions in the status.
constexpr std::size_t kGaveUp = 0, kForwards = 1, kMinusForwards = 2, kUsed = 3;
/// The count of forwards starts again there.
constexpr std::int32_t kForwardsEnd = 1 << 30;
/// Less than every count and its negative, so a maximum ignores it.
constexpr std::int32_t kNoCount = std::numeric_limits<std::int32_t>::min();
/// Longest reason that is sent to the other ranks.
constexpr std::int64_t kReasonBytes = 512;

}  // namespace

StatusExchange::StatusExchange(const collective::Group& group, std::size_t tracked)
    : group_(group),
      tracked_(tracked),
      status_(group.allocate({static_cast<std::int64_t>(kUsed + tracked)}, at::kInt)),
      used_(tracked) {}

void StatusExchange::note_used(std::size_t parameter) {
  if (tracked_ == 0) return;
  MutexLock lock(mutex_);
  used_[parameter] = 1;
}

void StatusExchange::count_forward() {
  MutexLock lock(mutex_);
  forwards_ = (forwards_ + 1) % kForwardsEnd;
}

void StatusExchange::restart_count() {
  MutexLock lock(mutex_);
  forwards_ = 0;
}

Future<at::Tensor> StatusExchange::send(const RoundReport& report) {
  {
    MutexLock lock(mutex_);
    sent_count_ = report.shadow ? kNoCount : forwards_;
    auto* status = status_.data_ptr<std::int32_t>();
    status[kGaveUp] = report.gave_up || report.hook_failed ? group_.rank() + 1 : 0;
    status[kForwards] = sent_count_;
    status[kMinusForwards] = report.shadow ? kNoCount : -forwards_;
    for (std::size_t i = 0; i < tracked_; ++i) status[kUsed + i] = report.has_pass ? used_[i] : 0;
    if (report.has_pass || report.gave_up) std::fill(used_.begin(), used_.end(), 0);
  }
  try {
    return group_.all_reduce(status_, collective::kMax);
  } catch (...) {  // a failed future, so that it reaches whatever waits for the round
    return make_failed_future<at::Tensor>(std::current_exception());
  }
}

int StatusExchange::failed_rank() const { return value(kGaveUp) - 1; }

bool StatusExchange::counts_differ() const {
  const std::int32_t most = value(kForwards);
  return most != kNoCount && most != -value(kMinusForwards);
}

bool StatusExchange::used(std::size_t parameter) const {
  return tracked_ == 0 || value(kUsed + parameter) != 0;
}

void StatusExchange::adopt_count() {
  const std::int32_t most = value(kForwards);
  MutexLock lock(mutex_);
  if (most != kNoCount) forwards_ = most;
}

void StatusExchange::broadcast_reason(int rank, const std::string& reason, Done done) const {
  at::Tensor text = at::zeros({kReasonBytes}, at::kByte);
  if (rank == group_.rank()) {
    const auto size = std::min<std::size_t>(reason.size(), kReasonBytes - 1);
    std::memcpy(text.data_ptr(), reason.data(), size);
  }
  group_.broadcast(text, rank)
      .add_done_callback([done = std::move(done), text,
                          world_rank = group_.ranks()[rank]](const Future<at::Tensor>& received) {
        if (received.error()) return done(received.error());
        done(std::make_exception_ptr(
            Error(
                ErrorKind::kRemoteFailure,
                fmt::format("rank {} gave up its backward pass, so the gradients of this step are invalid on "
                            "all ranks: {}",
                            world_rank, static_cast<const char*>(text.data_ptr())))
                .with_worker(fmt::format("rank {}", world_rank))));
      });
}

void StatusExchange::compare_counts(Done done) const {
  at::Tensor counts = at::full({group_.size()}, kNoCount, at::kInt);
  counts[group_.rank()] = sent_count_;
  group_.all_reduce(counts, collective::kMax)
      .add_done_callback(
          [done = std::move(done), counts, ranks = group_.ranks()](const Future<at::Tensor>& received) {
            if (received.error()) return done(received.error());
            const auto* count = counts.data_ptr<std::int32_t>();
            std::size_t fewest = ranks.size(), most = ranks.size();
            for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
              if (count[rank] == kNoCount) continue;
              if (fewest == ranks.size() || count[rank] < count[fewest]) fewest = rank;
              if (most == ranks.size() || count[rank] > count[most]) most = rank;
            }
            done(std::make_exception_ptr(Error(
                ErrorKind::kInvalid,
                fmt::format(
                    "the ranks reduce gradients of different steps: rank {} has run {} reduced forwards "
                    "and rank {} has run {}, so the gradients of this step are invalid on all ranks. A "
                    "rank is ahead after a forward without a backward: an exception or a `continue` between "
                    "the two, or an evaluation without torch::NoGradGuard. The next forward counts as "
                    "the same one on all ranks",
                    ranks[most], count[most], ranks[fewest], count[fewest]))));
          });
}

}  // namespace torchspan::data_parallel
