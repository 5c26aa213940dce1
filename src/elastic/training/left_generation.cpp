#include "elastic/training/left_generation.h"

#include <fmt/format.h>

namespace torchspan::elastic {
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
