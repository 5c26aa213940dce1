#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/log.h>

#include "checkpoint/files/disk.h"
#include "checkpoint/files/manifest.h"
#include "core/api/descriptor.h"

namespace torchspan::checkpoint {

/// A committed checkpoint in a Directory.
struct Committed {
  std::int64_t step = 0;
  int attempt = 1;   ///< above 1: the step was saved again
  std::string name;  ///< of its folder
};

/// Which checkpoints remain.
struct Retention {
  int keep_last = 3;  ///< at least 1
  int keep_best = 0;  ///< by the metric, in addition
  bool lower_is_better = true;
};

/// A folder of checkpoints: "step-00000100", "step-00000100.2" if the step was saved again. While a
/// checkpoint is written its folder has the suffix ".partial-<token>", and while it is deleted the prefix
/// "trash-". The file "latest" has the name of the newest one, for users and scripts.
class Directory {
 public:
  Directory(const Disk& disk, std::string path) : disk_(disk), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  const Disk& disk() const { return disk_; }
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }

  /// Committed checkpoints, newest first. Their content is not checked.
  std::vector<Committed> committed() const;
  /// Name of the temporary folder for a step.
  static std::string partial_name(std::int64_t step, std::uint64_t token);
  /// Makes the content of a partial folder a checkpoint, durably and at once; returns its name.
  std::string commit(const std::string& partial, std::int64_t step) const;
  /// Deletes what `retention` does not keep. `newest`, the newest verified checkpoint, stays. Folders with a
  /// damaged manifest do not count; they stay while an older checkpoint stays.
  void delete_old(const Retention& retention, const std::string& newest) const;
  /// Names of partial folders and trash: those of a save that runs now, and those that earlier processes left.
  std::vector<std::string> leftovers() const;
  /// Deletes them, and then throws for the first one that it could not delete. Only the process that has the directory's
  /// lock may.
  void delete_leftovers() const;

 private:
  void move_to_trash(const std::string& name) const;
  /// Takes a checkpoint away whose commit has failed: by a rename or, if the disk refuses it, by deleting.
  void withdraw(const std::string& name) const;

  const Disk& disk_;
  const std::string path_;
};

/// Reads and checks the manifest of a checkpoint folder, and sizes and headers of its files. Throws an Error
/// that names the file and the damage.
Manifest open_manifest(const Disk& disk, const std::string& folder);

/// Checks the checksums of the boxes number `first`, `first` + `stride`, … of all boxes of a checkpoint, so that several ranks can share the work. Throws Error{kInvalid} that
/// names tensor and file, and what the disk throws.
void verify_data(const Disk& disk, const std::string& folder, const Manifest& manifest, std::size_t first = 0,
                 std::size_t stride = 1);

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

/// What the committing rank does with its directory before it saves or restores: creates and locks it, and deletes what
/// failed saves have left. Not thread-safe.
class PreparedDirectory {
 public:
  /// `rank` is named in the lock. The directory and the log must outlive this object.
  PreparedDirectory(const Directory& directory, std::string rank, Log& log)
      : directory_(directory), rank_(std::move(rank)), log_(log) {}

  /// The first call creates the directory and takes its lock, and throws if one of these fails. It deletes what earlier
  /// processes have left, and a call after a failed save deletes what that one has left; a failure to delete is logged as a
  /// warning. Other calls keep leftovers: on a file system without locks they may be those of another job.
  void before_save();
  /// A save has failed: another rank may still begin to write after this one has deleted its folder.
  void save_failed() { failed_ = true; }
  /// Deletes what dead processes have left, if the lock shows that no process saves. Logs a warning if this process cannot
  /// save here. Never throws.
  void before_restore() const;

 private:
  void delete_dead_leftovers() const;
  void warn_if_read_only() const;

  const Directory& directory_;
  const std::string rank_;
  Log& log_;
  DirectoryLock lock_;  ///< from the first save on
  bool prepared_ = false;
  bool failed_ = false;  ///< a save since the last deletion
};

}  // namespace torchspan::checkpoint
