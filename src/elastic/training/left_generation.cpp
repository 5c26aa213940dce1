#include "elastic/training/left_generation.h"

#include <fmt/format.h>

namespace torchspan::elastic {

Error left_generation(int rank, std::uint64_t generation, const std::exception_ptr& failure) {
  const bool late = to_error(failure).kind() == ErrorKind::kTimedOut;
  return Error(late ? ErrorKind::kTimedOut : ErrorKind::kDisconnected,
               fmt::format("rank {} left generation {}: {}", rank, generation, describe(failure).text));
}

}  // namespace torchspan::elastic
