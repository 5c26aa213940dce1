#pragma once
#include <memory>
#include <vector>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Collective over `ranks`: Open MPI between them. The processes must have been started by mpirun, with ranks
/// of the world equal to MPI's; MPI is initialized here if the program has not. Throws kUnsupported where
/// that is not so, and in a build without Open MPI.
std::unique_ptr<BlockingCollectives> connect_mpi(const std::vector<int>& ranks, int world_rank,
                                                 int world_size);

}  // namespace torchspan::collective
