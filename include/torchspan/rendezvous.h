#pragma once
// A worker's identity, read from the launcher's environment variables. Includes no LibTorch.
#include <cstdint>
#include <map>
#include <string>

#include <torchspan/core/time.h>

namespace torchspan::rendezvous {

/// Environment variables by name. read_environment() reads only these, so tests can supply their own.
using Environment = std::map<std::string, std::string>;

/// The current variables of this process.
Environment process_environment();

/// The launcher convention from which a worker's identity was read.
enum class Launcher : std::uint8_t {
  kNone,        ///< nothing set: world size 1
  kExplicit,    ///< RANK and WORLD_SIZE: torchspan run, torchrun, Kubeflow, manual
  kOpenMpi,     ///< OMPI_COMM_WORLD_RANK, …
  kPmi,         ///< PMI_RANK, …: MPICH, Intel MPI
  kSlurm,       ///< SLURM_PROCID, …: srun, also with --mpi=pmi2, which sets PMI_RANK too
  kKubernetes,  ///< PET_NODE_RANK, …: a pod of the Kubernetes Trainer with one process
};

/// Identity of this process among the workers of its job, and the rendezvous address.
struct WorkerEnvironment {
  std::string name = "worker0";
  int rank = 0;
  int world_size = 1;  ///< 0: an open world
  int local_rank = 0;
  int local_world_size = 1;
  std::string master_host = "127.0.0.1";
  std::uint16_t master_port = 29500;
  int restart_count = 0;  ///< TORCHSPAN_RESTART_COUNT, else TORCHELASTIC_RESTART_COUNT
  Launcher launcher = Launcher::kNone;
  std::string job;             ///< id of the run and its TORCHSPAN_RESTART_COUNT; identifies the job
  std::string secret_file;     ///< path of the job's secret
  bool secret_named = false;   ///< TORCHSPAN_SECRET_FILE was set: the file must exist
  std::string runtime_folder;  ///< TORCHSPAN_RUNTIME_DIR, else XDG_RUNTIME_DIR/torchspan, else empty
  std::string temporary_folder = "/tmp";  ///< TMPDIR
  std::string error_file;  ///< TORCHELASTIC_ERROR_FILE: where the launcher looks for this worker's error
  /// TORCHSPAN_JOIN_TIMEOUT in seconds: how long the worker waits until all workers have joined.
  Duration join_timeout = std::chrono::seconds(60);

  std::string listen_host;       ///< TORCHSPAN_LISTEN_HOST; empty: the address on the route to rank 0
  std::string certificate_file;  ///< TORCHSPAN_CERTIFICATE_FILE; with the next two, replaces the secret
  std::string key_file;          ///< TORCHSPAN_KEY_FILE
  std::string authority_file;    ///< TORCHSPAN_AUTHORITY_FILE

  /// Whether, according to the launcher, all workers run on this host.
  bool one_host() const { return local_world_size == world_size; }
  /// Address of rank 0's store: "tcp:127.0.0.1:<port>" if all workers are on one host, else
  /// "tls:<host>:<port>".
  std::string store_address() const;
};

/// Reads this process's identity from the first complete convention: RANK and WORLD_SIZE (with MASTER_ADDR,
/// MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RESTART_COUNT; if TORCHELASTIC_USE_AGENT_STORE
/// is "True" the agent owns MASTER_PORT and the next port is used), OMPI_COMM_WORLD_*, PMI_*, SLURM_*, PET_*.
/// WORLD_SIZE=0 is an open world (docs/calls.md): without RANK, TORCHSPAN_NAME names the worker. Pure.
/// Throws kInvalid with the variable, its value and what is expected.
WorkerEnvironment read_environment(const Environment& environment);

}  // namespace torchspan::rendezvous
