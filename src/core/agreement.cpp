#include "core/api/agreement.h"

#include <fmt/format.h>
#include <set>
#include <utility>

namespace torchspan {

std::vector<Bytes> gather_pieces(const GatherBytes& gather, BytesView mine, const PieceFormat& pieces) {
  std::vector<Bytes> all;
  bool more = true;
  for (std::size_t begin = 0; more; begin += pieces.most) {
    ByteWriter out;
    if (pieces.with_total) out.put(static_cast<std::uint64_t>(mine.size()));
    const std::size_t from = std::min(begin, mine.size());
    out.put_bytes(mine.subspan(from, std::min(pieces.most, mine.size() - from)));
    const std::vector<Bytes> round = gather(out.bytes());
    all.resize(round.size());
    more = false;
    for (std::size_t rank = 0; rank < round.size(); ++rank) {
      ByteReader in(round[rank]);
      const std::uint64_t total = pieces.with_total ? in.get<std::uint64_t>() : 0;
      const BytesView piece = in.get_bytes(in.left());
      all[rank].insert(all[rank].end(), piece.begin(), piece.end());
      more = more || (pieces.with_total ? total > begin + pieces.most : piece.size() == pieces.most);
    }
  }
  return all;
}

Bytes encode_outcome(const RankOutcome& outcome) {
  ByteWriter out;
  out.put(outcome.failure ? outcome.failure->kind() : ErrorKind{});
  if (outcome.failure) {
    out.put_string(shortened(outcome.failure->message(), std::size_t{32} << 10));
  } else {
    out.put_bytes(outcome.result);
  }
  return out.take();
}

RankOutcome decode_outcome(BytesView bytes) {
  ByteReader in(bytes);
  RankOutcome outcome;
  const auto kind = in.get<ErrorKind>();
  if (kind != ErrorKind{}) {
    outcome.failure = Error(kind, in.get_string());
  } else {
    const BytesView result = in.get_bytes(in.left());
    outcome.result.assign(result.begin(), result.end());
  }
  return outcome;
}

std::vector<RankOutcome> gather_outcomes(const GatherBytes& gather, const RankOutcome& mine,
                                         const OutcomeFormat& format) {
  std::vector<RankOutcome> outcomes;
  for (const Bytes& bytes : gather(format.encode(mine))) outcomes.push_back(format.decode(bytes));
  return outcomes;
}

std::vector<Bytes> all_or_none(const GatherBytes& gather, const RankOutcome& mine,
                               const std::function<Error(std::size_t rank, const Error& failure)>& refusal,
                               const OutcomeFormat& format) {
  std::vector<RankOutcome> outcomes;
  try {
    outcomes = gather_outcomes(gather, mine, format);
  } catch (...) {
    if (mine.failure) throw Error(*mine.failure);
    throw;
  }
  std::vector<Bytes> results;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].failure) throw refusal(rank, *outcomes[rank].failure);
    results.push_back(std::move(outcomes[rank].result));
  }
  return results;
}

std::optional<Error> joint_failure(const std::vector<RankOutcome>& outcomes,
                                   const std::vector<std::string>& names, const std::string& what) {
  std::string text = what;
  std::optional<ErrorKind> kind;
  std::set<std::string> said;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].failure) continue;
    const std::string& message = outcomes[rank].failure->message();
    if (!said.insert(message).second) continue;
    text += kind ? "; " : ": ";
    text += names.size() == 1 ? message : fmt::format("{}: {}", names[rank], message);
    if (!kind) kind = outcomes[rank].failure->kind();
  }
  if (!kind) return std::nullopt;
  return Error(*kind, text);
}

}  // namespace torchspan
