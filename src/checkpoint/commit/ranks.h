#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/core/time.h>

namespace torchspan {
class Worker;
}  // namespace torchspan

namespace torchspan::checkpoint {

/// The ranks that save and restore together, ordered; the first one commits.
class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual std::size_t index() const = 0;
  /// "rank 2 (worker2)", by index.
  virtual const std::vector<std::string>& names() const = 0;
  /// Returns all ranks' bytes once each has called it with this tag. Throws Error: kTimedOut or kDisconnected
  /// naming ranks.
  virtual std::vector<Bytes> gather(const std::string& tag, const Bytes& mine) = 0;

  std::size_t size() const { return names().size(); }
  bool commits() const { return index() == 0; }
};

/// A single process.
std::unique_ptr<Ranks> make_single_rank();
/// The workers `participants` (empty: all), over the membership's connections, which calls and collective
/// operations do not use. `name` separates managers of one set of workers.
std::unique_ptr<Ranks> make_worker_ranks(const Worker& worker, std::vector<std::string> participants,
                                         std::string name, Duration timeout);

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
