#pragma once
#include <cstdint>
#include <exception>

#include <torchspan/core/error.h>

namespace torchspan::elastic {

/// What the other ranks of a generation get when `rank` leaves it because of `failure`: kTimedOut if it gave up waiting, so
/// that a late rank does not take this for a death; else kDisconnected.
Error left_generation(int rank, std::uint64_t generation, const std::exception_ptr& failure);

}  // namespace torchspan::elastic
