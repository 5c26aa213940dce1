#include "pipeline/runtime/agreement.h"

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

GatherBytes gather_among(const Worker& worker, const std::vector<std::string>& workers, Duration limit) {
  const auto round = [&worker, &workers, limit](BytesView piece) {
    return worker.all_gather_bytes(Bytes(piece.begin(), piece.end()), workers, limit);
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

std::vector<std::string> all_gather_text(const Worker& worker, const std::string& mine,
                                         const std::vector<std::string>& workers, Duration limit) {
  return to_texts(gather_among(worker, workers, limit)(to_bytes(mine)));
}

std::vector<std::string> all_or_none(const Worker& worker, const std::vector<std::string>& workers,
                                     ErrorKind kind, const std::function<std::string()>& mine) {
  const auto refusal = [&](std::size_t i, const Error& failure) {
    return Error(kind, failure.message()).with_worker(workers[i]);
  };
  return to_texts(torchspan::all_or_none(gather_among(worker, workers, kCreationTimeout),
                                         outcome_of([&] { return to_bytes(mine()); }), refusal, kTextFormat));
}

}  // namespace torchspan::pipeline
