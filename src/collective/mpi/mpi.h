#pragma once
#include <memory>
#include <vector>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Collective over `ranks`: uses Open MPI between them. mpirun must have started the processes, with world
/// ranks equal to MPI's; initializes MPI if the program has not. Throws kUnsupported otherwise, and in a
/// build without Open MPI.
std::unique_ptr<BlockingCollectives> connect_mpi(const std::vector<int>& ranks, int world_rank,
                                                 int world_size);

}  // namespace torchspan::collective
