#pragma once
#include <cstdint>
#include <map>
#include <string>

#include <torchspan/core/time.h>
#include <torchspan/detail/net/secret.h>

namespace torchspan::rendezvous {

/// Environment variables by name. read_environment() looks at nothing else, so tests and embedders make their
/// own.
using Environment = std::map<std::string, std::string>;

/// The variables of this process, as they are now.
Environment process_environment();

/// Which convention told a worker who it is.
enum class Launcher : std::uint8_t {
  kNone,      ///< nothing set: a world of one
  kExplicit,  ///< RANK and WORLD_SIZE: torchspan run, torchrun, Kubeflow, by hand
  kOpenMpi,   ///< OMPI_COMM_WORLD_RANK, …
  kPmi,       ///< PMI_RANK, …: MPICH, Intel MPI
  kSlurm,     ///< SLURM_PROCID, …: srun
};

/// Who this process is among the workers of its job, and where they meet.
struct WorkerEnvironment {
  std::string name = "worker0";
  int rank = 0;
  int world_size = 1;  ///< 0: an open world
  int local_rank = 0;
  int local_world_size = 1;
  std::string master_host = "127.0.0.1";
  std::uint16_t master_port = 29500;
  int restart_count = 0;
  Launcher launcher = Launcher::kNone;
  std::string job;             ///< id of the run and its restart count: told apart from other jobs by it
  std::string secret_file;     ///< where load_secret() looks
  bool secret_named = false;   ///< TORCHSPAN_SECRET_FILE was set: then the file must be there already
  std::string runtime_folder;  ///< TORCHSPAN_RUNTIME_DIR, else XDG_RUNTIME_DIR/torchspan, else empty
  std::string temporary_folder = "/tmp";  ///< TMPDIR
  Duration join_timeout = std::chrono::seconds(60);

  std::string listen_host;       ///< TORCHSPAN_LISTEN_HOST: instead of the address that leads to the master
  std::string certificate_file;  ///< TORCHSPAN_CERTIFICATE_FILE, with the next two: instead of the secret
  std::string key_file;          ///< TORCHSPAN_KEY_FILE
  std::string authority_file;    ///< TORCHSPAN_AUTHORITY_FILE

  /// Whether the launcher said that all workers run on this host.
  bool one_host() const { return local_world_size == world_size; }
  /// Where workers find the store of rank 0: "tcp:127.0.0.1:<port>" when all are on one host, else
  /// "tls:<host>:<port>".
  std::string store_address() const;
};

/// Reads who we are; the first complete convention wins: RANK and WORLD_SIZE (with MASTER_ADDR, MASTER_PORT,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RESTART_COUNT; when TORCHELASTIC_USE_AGENT_STORE is "True" the
/// agent owns MASTER_PORT and we take the next one), OMPI_COMM_WORLD_*, PMI_*, SLURM_*. WORLD_SIZE=0 is an
/// open world (membership.h): RANK may be left out, then TORCHSPAN_NAME names the worker. Pure. Throws
/// kInvalid with the variable, its value and what is expected.
WorkerEnvironment read_environment(const Environment& environment);

/// First host of a Slurm node list in its compressed form: "gpu[03-05,9],login1" gives "gpu03". Throws
/// kInvalid for an empty or unbalanced list.
std::string first_slurm_host(const std::string& list);

/// The job's secret from `worker.secret_file`. The default file is made once, mode 0600, when all workers run
/// on one host; a named file that is missing, or a missing default file of a world of several hosts, throws
/// kInvalid with the command that makes one, unless certificates prove who workers of other hosts are. Safe
/// against several processes at once.
net::Secret load_secret(const WorkerEnvironment& worker);

/// A folder of mode 0700 that belongs to this user, for sockets: `worker.runtime_folder` if named, else
/// torchspan-<uid> in `worker.temporary_folder`; made when missing, and rid of the sockets of workers that
/// were killed. Throws kDenied when it belongs to somebody else or is open to others, kInvalid when it cannot
/// be made or its path is too long for sockets.
std::string make_runtime_folder(const WorkerEnvironment& worker);

}  // namespace torchspan::rendezvous
