#pragma once
#include <cstdint>
#include <exception>
#include <optional>

#include <torchspan/core/error.h>
#include <torchspan/core/log.h>
#include <torchspan/core/time.h>
#include <torchspan/elastic.h>

#include "core/api/saturated_time.h"
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

/// How long rank 0 waits for the reports of late ranks. A rank that computes or waits for others notices within
/// `step_timeout` that its generation has ended.
constexpr Duration late_limit(Duration step_timeout) {
  constexpr Duration kReportTime = std::chrono::seconds(1);
  return saturated_sum(step_timeout, kReportTime);
}

/// What the other ranks of a generation get when `rank` leaves it for the next one because of `failure` of the group:
/// kTimedOut if it gave up waiting, so that a late rank does not take this for a death; else kDisconnected.
Error left_generation(int rank, std::uint64_t generation, const std::exception_ptr& failure);
/// The same if `rank` stops training: kDisconnected, also if its program failed with a timeout.
Error left_training(int rank, std::uint64_t generation, const std::exception_ptr& failure);

}  // namespace torchspan::elastic
