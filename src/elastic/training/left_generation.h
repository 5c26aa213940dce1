#pragma once
#include <cstdint>
#include <exception>

#include <torchspan/core/error.h>

namespace torchspan::elastic {

/// What the other ranks of a generation get when `rank` leaves it for the next one because of `failure` of the group:
/// kTimedOut if it gave up waiting, so that a late rank does not take this for a death; else kDisconnected.
Error left_generation(int rank, std::uint64_t generation, const std::exception_ptr& failure);
/// The same if `rank` stops training: kDisconnected, also if its program failed with a timeout.
Error left_training(int rank, std::uint64_t generation, const std::exception_ptr& failure);

}  // namespace torchspan::elastic
