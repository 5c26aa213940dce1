#include "data_parallel/join.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

constexpr int kLive = 1, kSynchronize = 2, kFailed = 4;

}  // namespace

int JoinRound::live_count() const { return static_cast<int>(std::count(live.begin(), live.end(), true)); }
int JoinRound::first_live() const {
  return static_cast<int>(std::find(live.begin(), live.end(), true) - live.begin());
}
int JoinRound::last_live() const {
  return static_cast<int>(live.rend() - std::find(live.rbegin(), live.rend(), true)) - 1;
}

JoinRound tell(const collective::Group& group, const JoinWord& mine) {
  at::Tensor words = group.allocate({group.size()}, at::kInt);
  words.zero_();
  words.data_ptr<std::int32_t>()[group.rank()] =
      (mine.live ? kLive : 0) | (mine.synchronize ? kSynchronize : 0) | (mine.failed ? kFailed : 0);
  group.all_reduce(words, collective::kMaximum).wait();
  const auto* word = words.data_ptr<std::int32_t>();
  JoinRound round;
  int reduces = -1, accumulates = -1;
  for (int rank = 0; rank < group.size(); ++rank) {
    round.live.push_back((word[rank] & kLive) != 0);
    if ((word[rank] & kFailed) != 0) round.failed = rank;
    if ((word[rank] & kLive) != 0) ((word[rank] & kSynchronize) != 0 ? reduces : accumulates) = rank;
  }
  round.synchronize = reduces >= 0;
  if (round.failed >= 0 && !mine.failed) {
    throw Error(ErrorKind::kRemoteFailure,
                fmt::format("the training loop of rank {} inside join() ended with an exception",
                            group.ranks()[round.failed]))
        .with_worker(fmt::format("rank {}", group.ranks()[round.failed]));
  }
  if (reduces >= 0 && accumulates >= 0) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("rank {} reduces this forward and rank {} says no_sync: inside join() all ranks that "
                    "have batches do the same",
                    group.ranks()[reduces], group.ranks()[accumulates]));
  }
  return round;
}

}  // namespace torchspan::data_parallel
