#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>

/// Joint steps of ranks: after an exchange, all have the same results, or all throw the same error.
namespace torchspan {

/// Contributes bytes, and returns those of all ranks, in the same order on all. Throws if a rank is gone or late.
using GatherBytes = std::function<std::vector<Bytes>(BytesView mine)>;

/// How gather_pieces() divides what a rank contributes.
struct PieceFormat {
  std::size_t most = std::size_t{1} << 16;  ///< bytes of a piece, without its total
  /// Whether each piece begins with the number of all bytes of its rank. Otherwise a piece of `most` bytes announces another.
  bool with_total = false;
};

/// Gathers bytes of any length, in as many rounds as the longest contribution has pieces. Collective.
std::vector<Bytes> gather_pieces(const GatherBytes& gather, BytesView mine, const PieceFormat& pieces);

/// What a rank contributes to a joint step: its result, or why it has none.
struct RankOutcome {
  std::optional<Error> failure = {};
  Bytes result = {};
};

/// Runs `body`, whose result becomes the outcome; what it throws becomes the failure.
template <class F>
RankOutcome outcome_of(F&& body) {
  RankOutcome outcome;
  try {
    outcome.result = body();
  } catch (...) {
    outcome.failure = to_error(std::current_exception());
  }
  return outcome;
}

/// The failure's kind and message, of at most 32 KiB; without a failure, a zero and the result.
Bytes encode_outcome(const RankOutcome& outcome);
RankOutcome decode_outcome(BytesView bytes);

/// The bytes of the outcomes of one kind of step, which releases must not change.
struct OutcomeFormat {
  Bytes (*encode)(const RankOutcome& outcome) = encode_outcome;
  RankOutcome (*decode)(BytesView bytes) = decode_outcome;
};

/// Returns the outcomes of all ranks. Collective.
std::vector<RankOutcome> gather_outcomes(const GatherBytes& gather, const RankOutcome& mine,
                                         const OutcomeFormat& format = {});

/// Returns the results of all ranks if none failed; otherwise throws what `refusal` makes of the first failure, whose rank is
/// its place among the gathered bytes. If the exchange fails after this rank has failed, throws this rank's failure, which may
/// be the cause. Collective.
std::vector<Bytes> all_or_none(const GatherBytes& gather, const RankOutcome& mine,
                               const std::function<Error(std::size_t rank, const Error& failure)>& refusal,
                               const OutcomeFormat& format = {});

/// One error that begins with `what` and has each different failure once, after the name of its first rank; nullopt if no
/// rank failed. Its kind is that of the first failure.
std::optional<Error> joint_failure(const std::vector<RankOutcome>& outcomes,
                                   const std::vector<std::string>& names, const std::string& what);

/// The first rank whose value differs from that of the first rank; nullopt if all are equal.
template <class T>
std::optional<std::size_t> first_difference(const std::vector<T>& by_rank) {
  const auto found = std::find_if(by_rank.begin(), by_rank.end(),
                                  [&](const T& value) { return !(value == by_rank.front()); });
  if (found == by_rank.end()) return std::nullopt;
  return static_cast<std::size_t>(found - by_rank.begin());
}

}  // namespace torchspan
