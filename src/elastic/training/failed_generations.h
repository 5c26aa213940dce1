#pragma once
#include <cstdint>
#include <optional>

#include <torchspan/core/error.h>
#include <torchspan/core/log.h>
#include <torchspan/elastic/options.h>

#include "quorum/api/generation.h"

namespace torchspan::elastic {

/// Counts generations in a row that failed before their first step although no member ended, such as by a copy of the
/// state that takes longer than step_timeout: to try again is then of no use. For one thread at a time.
class FailedGenerations {
 public:
  /// After so many of them, settle() throws.
  static constexpr int kMostInARow = 5;

  /// Both arguments must outlive this object.
  FailedGenerations(Log& log, const ElasticOptions& options) : log_(log), options_(options) {}

  /// `departures`: how many processes of its ranks have ended since the job began.
  void begin(const quorum::Generation& generation, std::uint64_t departures);
  void committed();
  void failed(const Error& reason);
  /// Counts the current generation if it failed before its first step and none of its processes has ended since
  /// begin(); logs a warning with the reason. Throws the reason with advice after kMostInARow.
  void settle(std::uint64_t departures);

 private:
  Log& log_;
  const ElasticOptions& options_;
  quorum::Generation generation_;
  std::uint64_t departures_ = 0;
  bool stepped_ = false;         ///< whether the current generation committed a step
  std::optional<Error> reason_;  ///< why it failed before that
  int in_a_row_ = 0;
};

}  // namespace torchspan::elastic
