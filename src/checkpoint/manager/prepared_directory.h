#pragma once
#include <string>
#include <utility>

#include <torchspan/core/log.h>

#include "checkpoint/files/directory.h"
#include "checkpoint/files/directory_lock.h"

namespace torchspan::checkpoint {

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
