#pragma once
#include <vector>

#include <torchspan/detail/rpc/endpoint.h>
#include <torchspan/rpc/debug.h>

#include "rpc/references/program_names.h"
#include "rpc/references/shared_table.h"

namespace torchspan::rpc {

/// Returns all entries of a worker's table of references, oldest first. Holds the table's lock for short
/// portions.
std::vector<RRefInfo> list_references(const SharedRRefTable& shared, const ProgramNames& names,
                                      Endpoint& endpoint);
/// Returns only the values here that other workers refer to.
std::vector<RRefInfo> list_owned_values(const SharedRRefTable& shared, const ProgramNames& names,
                                        Endpoint& endpoint);

}  // namespace torchspan::rpc
