#pragma once
#include <cstdint>
#include <string>

#include <torchspan/rendezvous.h>

namespace torchspan::launch {

/// The place of this launcher among those of one job, each of which starts equally many workers on its host.
struct NodePlace {
  int count = 1;      ///< hosts of the job
  int node_rank = 0;  ///< of this host; the workers of host 0 have the first ranks
  std::string rdzv_host = {};
  std::uint16_t rdzv_port = 0;  ///< rank 0 serves the store there; with restarts, launcher 0 serves its own
  std::string job_id = {};      ///< equal on all hosts
  std::string port_range = {};  ///< TORCHSPAN_PORT_RANGE for the workers; empty: theirs

  bool several() const { return count > 1; }
  int first_rank(int workers) const { return node_rank * workers; }
};

/// The options --nnodes, --node-rank, --rdzv, --rdzv-id and --port-range as they are written; empty if absent.
struct NodeOptions {
  std::string nodes = {};
  std::string node_rank = {};
  std::string rdzv = {};
  std::string rdzv_id = {};
  std::string port_range = {};
};

/// Throws kInvalid that names the wrong option. `environment` names the file of the job's secret, which must
/// exist if there are several hosts; without --nnodes, it also gives the place of a pod (PET_NNODES, …).
NodePlace read_node_options(const NodeOptions& options, const rendezvous::Environment& environment);

/// Replaces the variables of a worker that differ when a job has several hosts. `base`: the launcher's own
/// environment, `local_rank`: the rank of the worker on its host.
void add_node_variables(const NodePlace& place, const rendezvous::Environment& base, int workers,
                        int local_rank, rendezvous::Environment& worker);

}  // namespace torchspan::launch
