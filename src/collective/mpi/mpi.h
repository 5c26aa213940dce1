#pragma once
#include <memory>
#include <vector>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Collective over `ranks`: connects them with Open MPI, and initializes MPI if the program has not. mpirun
/// must have started the processes, with ranks equal to the world's. Throws kUnsupported if it has not, and
/// in a build without Open MPI.
std::unique_ptr<BlockingCollectives> connect_mpi(const std::vector<int>& ranks, int world_rank,
                                                 int world_size);

}  // namespace torchspan::collective
