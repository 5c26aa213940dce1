#pragma once
#include <string>

namespace torchspan::rendezvous {

/// How many tasks the node with index `node` runs, from Slurm's list "2(x3),1"; errors name `variable`.
int slurm_tasks_of_node(const std::string& list, int node, const std::string& variable);

}  // namespace torchspan::rendezvous
