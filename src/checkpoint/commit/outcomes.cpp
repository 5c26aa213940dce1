#include "checkpoint/commit/outcomes.h"

#include <fmt/format.h>
#include <set>

namespace torchspan::checkpoint {

std::vector<RankOutcome> exchange_outcomes(Ranks& ranks, const std::string& tag, const RankOutcome& mine) {
  ByteWriter out;
  out.put(mine.failure ? mine.failure->kind() : ErrorKind{});
  if (mine.failure) {
    out.put_string(mine.failure->message());
  } else {
    out.put_bytes(mine.result);
  }
  std::vector<RankOutcome> outcomes;
  for (const Bytes& bytes : ranks.gather(tag, out.take())) {
    ByteReader in(bytes);
    RankOutcome& outcome = outcomes.emplace_back();
    const auto kind = in.get<ErrorKind>();
    if (kind != ErrorKind{}) {
      outcome.failure = Error(kind, in.get_string());
    } else {
      const BytesView result = in.get_bytes(in.left());
      outcome.result.assign(result.begin(), result.end());
    }
  }
  return outcomes;
}

std::optional<Error> joint_failure(const std::vector<RankOutcome>& outcomes, const Ranks& ranks,
                                   const std::string& what) {
  std::string text = what;
  std::optional<ErrorKind> kind;
  std::set<std::string> said;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].failure) continue;
    const std::string& message = outcomes[rank].failure->message();
    if (!said.insert(message).second) continue;
    text += kind ? "; " : ": ";
    text += ranks.size() == 1 ? message : fmt::format("{}: {}", ranks.names()[rank], message);
    if (!kind) kind = outcomes[rank].failure->kind();
  }
  if (!kind) return std::nullopt;
  return Error(*kind, text);
}

}  // namespace torchspan::checkpoint
