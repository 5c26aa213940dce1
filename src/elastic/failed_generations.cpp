#include "elastic/failed_generations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <utility>

namespace torchspan::elastic {

void FailedGenerations::begin(const quorum::Generation& generation, std::uint64_t departures) {
  generation_ = generation;
  departures_ = departures;
  stepped_ = false;
  reason_.reset();
}

void FailedGenerations::committed() {
  stepped_ = true;
  in_a_row_ = 0;
  reason_.reset();
}

void FailedGenerations::failed(const Error& reason) {
  if (!stepped_) reason_ = reason;
}

void FailedGenerations::settle(std::uint64_t departures) {
  const auto reason = std::exchange(reason_, std::nullopt);
  if (!reason || departures != departures_) return;
  const std::string what =
      fmt::format("generation {} of the elastic trainer '{}' (ranks {}) failed before its first step",
                  generation_.number, options_.name, fmt::join(generation_.ranks, ", "));
  if (++in_a_row_ < kMostInARow) {
    return log_.warning(
        fmt::format("{} ({} of {} in a row): {}", what, in_a_row_, kMostInARow, reason->message()));
  }
  in_a_row_ = 0;
  throw Error(
      reason->kind(),
      fmt::format("{}, as did the {} before it: {}; make ElasticOptions::step_timeout ({:g} s) longer than a "
                  "copy of the state and the first step take, or check the network between these ranks",
                  what, kMostInARow - 1, reason->message(), to_seconds(options_.step_timeout)));
}

namespace {

Error departure_error(ErrorKind kind, int rank, std::uint64_t generation, const std::exception_ptr& failure) {
  return Error(kind, fmt::format("rank {} left generation {}: {}", rank, generation, describe(failure).text));
}

}  // namespace

Error left_generation(int rank, std::uint64_t generation, const std::exception_ptr& failure) {
  const bool late = to_error(failure).kind() == ErrorKind::kTimedOut;
  return departure_error(late ? ErrorKind::kTimedOut : ErrorKind::kDisconnected, rank, generation, failure);
}

Error left_training(int rank, std::uint64_t generation, const std::exception_ptr& failure) {
  return departure_error(ErrorKind::kDisconnected, rank, generation, failure);
}

}  // namespace torchspan::elastic
