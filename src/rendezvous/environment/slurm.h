#pragma once
#include <string>

namespace torchspan::rendezvous {

/// First host of a compressed Slurm node list: "gpu[03-05,9],login1" gives "gpu03". Throws kInvalid for an
/// empty or unbalanced list.
std::string first_slurm_host(const std::string& list);

/// How many tasks the node with index `node` runs, from Slurm's list "2(x3),1"; errors name `variable`.
int slurm_tasks_of_node(const std::string& list, int node, const std::string& variable);

}  // namespace torchspan::rendezvous
