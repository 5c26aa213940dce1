#include "pipeline/runtime/agreement.h"

#include <algorithm>
#include <utility>

#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/worker_backend.h>

#include "core/api/saturated_time.h"

namespace torchspan::pipeline {
namespace {

Bytes to_bytes(const std::string& text) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(bytes, bytes + text.size());
}

std::string to_text(BytesView bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<std::string> to_texts(const std::vector<Bytes>& all) {
  std::vector<std::string> texts;
  for (const Bytes& bytes : all) texts.push_back(to_text(bytes));
  return texts;
}

GatherBytes gather_among(const Worker& worker, const std::vector<std::string>& workers, Duration limit,
                         const WhileWaiting& while_waiting) {
  const auto round = [&worker, &workers, limit, &while_waiting](BytesView piece) {
    return all_gather_bytes(worker, Bytes(piece.begin(), piece.end()), workers, limit, while_waiting);
  };
  return [round](BytesView mine) { return gather_pieces(round, mine, {.most = kMostBytes}); };
}

/// The bytes of release 0.1.0: '+' and a result, or '-' and the message of a failure.
constexpr OutcomeFormat kTextFormat{
    .encode =
        [](const RankOutcome& outcome) {
          return to_bytes(outcome.failure ? '-' + outcome.failure->message() : '+' + to_text(outcome.result));
        },
    .decode =
        [](BytesView bytes) {
          ByteReader in(bytes);
          const bool failed = in.get<char>() == '-';
          const std::string text = to_text(in.get_bytes(in.left()));
          if (failed) return RankOutcome{.failure = Error(ErrorKind::kRemoteFailure, text)};
          return RankOutcome{.result = to_bytes(text)};
        }};

}  // namespace

std::vector<Bytes> all_gather_bytes(const Worker& worker, const Bytes& mine,
                                    const std::vector<std::string>& workers, Duration limit,
                                    const WhileWaiting& while_waiting) {
  if (!while_waiting) return worker.all_gather_bytes(mine, workers, limit);
  const rpc::Gathering who = worker.backend()->gathering(workers);
  rendezvous::Membership::Wait wait{.until = worker.runtime().executor.deadline_in(no_limit_if_zero(limit))};
  wait.every = std::chrono::seconds(1);
  wait.report = [&](const auto& /*missing*/) { while_waiting(); };
  wait.no_answer = while_waiting;
  // The tag of Worker::all_gather_bytes(), which other workers may call.
  const std::vector<Bytes> by_rank =
      who.membership->all_gather_bytes("user.all_gather", mine, who.ranks, wait);
  std::vector<Bytes> all;
  for (const int rank : who.asked) {
    const auto place = std::ranges::lower_bound(who.ranks, rank) - who.ranks.begin();
    all.push_back(by_rank[static_cast<std::size_t>(place)]);
  }
  return all;
}

std::vector<std::string> all_gather_text(const Worker& worker, const std::string& mine,
                                         const std::vector<std::string>& workers, Duration limit,
                                         const WhileWaiting& while_waiting) {
  return to_texts(gather_among(worker, workers, limit, while_waiting)(to_bytes(mine)));
}

std::vector<std::string> all_or_none(const Worker& worker, const std::vector<std::string>& workers,
                                     ErrorKind kind, const std::function<std::string()>& mine,
                                     const WhileWaiting& while_waiting) {
  const auto refusal = [&](std::size_t i, const Error& failure) {
    return Error(kind, failure.message()).with_worker(workers[i]);
  };
  return to_texts(torchspan::all_or_none(gather_among(worker, workers, kCreationTimeout, while_waiting),
                                         outcome_of([&] { return to_bytes(mine()); }), refusal, kTextFormat));
}

}  // namespace torchspan::pipeline
