#include "data_parallel/module/join.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

constexpr int kLive = 1, kSynchronize = 2, kFailed = 4, kReduces = 8;
constexpr std::int64_t kFailureBytes = 512;

int encode(const JoinWord& word) {
  return (word.live ? kLive : 0) | (word.synchronize ? kSynchronize : 0) |
         (word.failure.empty() ? 0 : kFailed) | (word.reduces ? kReduces : 0);
}

/// Collective: broadcasts the failure of one rank, and throws it on ranks that did not fail.
void broadcast_failure(const collective::Group& group, int failed, const JoinWord& mine) {
  at::Tensor text = at::zeros({kFailureBytes}, at::kByte);
  if (failed == group.rank()) {
    const auto size = std::min<std::size_t>(mine.failure.size(), kFailureBytes - 1);
    std::memcpy(text.data_ptr(), mine.failure.data(), size);
  }
  group.broadcast(text, failed).wait();
  if (!mine.failure.empty()) return;
  const int rank = group.ranks()[static_cast<std::size_t>(failed)];
  throw Error(ErrorKind::kRemoteFailure,
              fmt::format("the training loop of rank {} inside join() ended with an exception: {}", rank,
                          static_cast<const char*>(text.data_ptr())))
      .with_worker(fmt::format("rank {}", rank));
}

/// Throws if one live rank sets `bit` and another does not.
void refuse_difference(const collective::Group& group, const std::int32_t* words, int bit, const char* what) {
  int with = -1, without = -1;
  for (int rank = 0; rank < group.size(); ++rank) {
    if ((words[rank] & kLive) != 0) ((words[rank] & bit) != 0 ? with : without) = rank;
  }
  if (with < 0 || without < 0) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format(fmt::runtime(what), group.ranks()[static_cast<std::size_t>(with)],
                          group.ranks()[static_cast<std::size_t>(without)]));
}

}  // namespace

int JoinRound::live_count() const { return static_cast<int>(std::count(live.begin(), live.end(), true)); }
int JoinRound::first_live() const {
  return static_cast<int>(std::find(live.begin(), live.end(), true) - live.begin());
}
int JoinRound::last_live() const {
  return static_cast<int>(live.rend() - std::find(live.rbegin(), live.rend(), true)) - 1;
}

JoinRound agree_on_next_round(const collective::Group& group, const JoinWord& mine) {
  at::Tensor words = group.allocate({group.size()}, at::kInt);
  words.zero_();
  words.data_ptr<std::int32_t>()[group.rank()] = encode(mine);
  group.all_reduce(words, collective::kMax).wait();
  const auto* word = words.data_ptr<std::int32_t>();
  JoinRound round;
  int failed = -1;
  for (int rank = 0; rank < group.size(); ++rank) {
    round.live.push_back((word[rank] & kLive) != 0);
    if ((word[rank] & kFailed) != 0) failed = rank;
    if (!round.live.back()) continue;
    round.synchronize = round.synchronize || (word[rank] & kSynchronize) != 0;
    round.reduces = round.reduces || (word[rank] & kReduces) != 0;
  }
  if (failed >= 0) {
    broadcast_failure(group, failed, mine);
    return round;
  }
  refuse_difference(
      group, word, kReduces,
      "rank {} begins a reduction and rank {} begins a forward: inside join() all ranks that have "
      "batches must run the same forwards and backwards in the same order");
  refuse_difference(
      group, word, kSynchronize,
      "rank {} reduces this forward and rank {} runs it under no_sync(): inside join() all ranks "
      "that have batches must do the same");
  return round;
}

}  // namespace torchspan::data_parallel
