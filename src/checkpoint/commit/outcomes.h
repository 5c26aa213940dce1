#pragma once
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>

#include "checkpoint/commit/ranks.h"

namespace torchspan::checkpoint {

/// A rank's success, with a result, or its failure.
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

/// Exchanges the outcomes; returns those of all ranks.
std::vector<RankOutcome> exchange_outcomes(Ranks& ranks, const std::string& tag, const RankOutcome& mine);

/// One error that begins with `what` and names every rank that failed; nullopt if none did. Its kind is that
/// of the first failure.
std::optional<Error> joint_failure(const std::vector<RankOutcome>& outcomes, const Ranks& ranks,
                                   const std::string& what);

}  // namespace torchspan::checkpoint
