#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/net.h>
#include <torchspan/rendezvous.h>

#include "core/api/descriptor.h"

namespace torchspan::launch {

/// The value of a variable; empty if it is not set.
inline std::string value_of(const rendezvous::Environment& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::string() : found->second;
}

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

using rendezvous::Environment;

/// The settings that are the same for all workers of an attempt.
struct JobSetting {
  int workers = 1;
  int restart_count = 0;  ///< attempts before this one
  int max_restarts = 0;
  int preempt_signal = 0;  ///< 0: not passed to the workers
  std::string name_prefix = "worker";
  std::string run_id;
  std::uint16_t master_port = 0;
  std::string secret_file;
  std::string runtime_folder;
  std::string error_folder;  ///< for the workers' error files
  int cores = 1;
  NodePlace nodes;
  Environment extra;  ///< set by the user for this job; overrides all other variables

  /// The rank in the job of a worker of this host.
  int rank_of(int local_rank) const { return nodes.first_rank(workers) + local_rank; }
  /// The rank on this host of one of its workers.
  int local_rank_of(int rank) const { return rank - nodes.first_rank(workers); }
};

/// Returns the path of the file in which a process of a rank leaves its error. `incarnation` counts the processes
/// of the rank in this attempt.
std::string error_file_of(const JobSetting& setting, int rank, int incarnation);

/// Returns the id by which kJobsVariable marks the processes of one rank, besides the job's.
std::string mark_of(const JobSetting& setting, int rank);

/// Returns the environment of one rank's worker: `base` without the variables of other launchers, then
/// torchspan's, then the user's.
Environment worker_environment(const Environment& base, const JobSetting& setting, int rank,
                               int incarnation = 0);
/// Returns the value of OMP_NUM_THREADS for the workers; 0 if the user has set it.
int chosen_threads(const Environment& base, const JobSetting& setting);

/// Returns the path of a program: itself if it contains a slash, else found in PATH. Throws kInvalid if the
/// file does not exist or cannot be executed.
std::string find_program(const std::string& name, const Environment& environment);

/// Returns the ports "FIRST-LAST" or "PORT"; none for an empty text. Throws kInvalid for any other text.
net::PortRange read_port_range(const std::string& range);

/// Returns a free port of this host for the store of workers on several hosts: the last free one of a range
/// "FIRST-LAST", of which workers take the first ones, or any if the range is empty. Throws kInvalid if none is free.
ReservedPort choose_store_port(const std::string& range);

/// Throws kInvalid if a port of the loopback interface is in use.
void check_port(std::uint16_t port);
/// Returns a free port of the loopback interface below the system's range for outgoing connections, so that no connection
/// takes it before rank 0 listens. Other launchers that draw theirs get other ports.
ReservedPort choose_port();

/// Number of cores that this process may use, by its affinity and by the CPU limit of its container.
int usable_cores();

/// The private folder of one job: mode 0700, with the job's secret and folders for sockets and error files. The
/// destructor removes it with its contents. It is locked while this process lives, so that a later job can
/// find and remove the folder of a launcher that was killed.
class JobFolder {
 public:
  /// Creates it in XDG_RUNTIME_DIR, TMPDIR or /tmp, the first with an absolute path that leaves room for sockets. Removes
  /// this user's folders there whose launchers have ended.
  explicit JobFolder(const Environment& environment);
  ~JobFolder();
  JobFolder(const JobFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string secret_file() const { return path_ + "/secret"; }
  std::string runtime_folder() const { return path_ + "/run"; }
  std::string error_folder() const { return path_ + "/errors"; }

 private:
  void make_locked(const std::string& parent);

  std::string path_;
  Descriptor lock_;
};

}  // namespace torchspan::launch
