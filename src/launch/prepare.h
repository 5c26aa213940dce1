#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/detail/rendezvous/environment.h>

#include "core/api/descriptor.h"

namespace torchspan::launch {

using rendezvous::Environment;

/// What is the same for all workers of a job.
struct JobSetting {
  int workers = 1;
  std::string name_prefix = "worker";
  std::string run_id;
  std::uint16_t master_port = 0;
  std::string secret_file;
  std::string runtime_folder;
  int cores = 1;
  Environment extra;  ///< said by the user for this job; wins over everything
};

/// The variables of the worker of one rank: `base` without what another launcher said, ours, then the user's.
Environment worker_environment(const Environment& base, const JobSetting& setting, int rank);
/// The value of OMP_NUM_THREADS that we choose for the workers; 0 when the user chose.
int chosen_threads(const Environment& base, const JobSetting& setting);

/// The path of a program: itself when it has a slash, else found in PATH. Throws kInvalid when there is no
/// such file, or one that cannot be executed.
std::string find_program(const std::string& name, const Environment& environment);

/// `wanted` if it is free on the loopback interface, else kInvalid; for 0 a free port below the system's
/// range for outgoing connections, so that no connection takes it before rank 0 does.
std::uint16_t choose_port(std::uint16_t wanted);

/// Cores that this process may use.
int usable_cores();

/// The private folder of one job: mode 0700, with the job's secret and a folder for its sockets. Removed with
/// everything in it by the destructor. It is locked for as long as this process lives, so that a later job
/// finds and removes the folder of a launcher that was killed.
class JobFolder {
 public:
  /// In XDG_RUNTIME_DIR, TMPDIR or /tmp, the first whose path leaves room for sockets. Removes this user's
  /// folders there whose launchers are gone.
  explicit JobFolder(const Environment& environment);
  ~JobFolder();
  JobFolder(const JobFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string secret_file() const { return path_ + "/secret"; }
  std::string runtime_folder() const { return path_ + "/run"; }

 private:
  void make_locked(const std::string& parent);

  std::string path_;
  Descriptor lock_;
};

}  // namespace torchspan::launch
