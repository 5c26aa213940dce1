#pragma once
#include <string>

#include "core/api/descriptor.h"

namespace torchspan::checkpoint {

/// The right to write to a directory of checkpoints: flock() on its file "lock", which names the holder. Two
/// managers exclude each other, in one process, on one host, and between hosts on file systems whose flock()
/// works between hosts (NFS 4). The kernel releases it when the process ends.
class DirectoryLock {
 public:
  /// Takes the lock for `holder`, unless this object has it. Throws Error{kInvalid} that names the other holder, and
  /// the errors of Disk. Returns a warning if the file system has no locks, else an empty text.
  std::string take(const std::string& directory, const std::string& holder);

 private:
  Descriptor file_;
};

/// Returns "rank 0 ('worker0') of process 17 on node3" for this process.
std::string describe_holder(const std::string& rank);

}  // namespace torchspan::checkpoint
