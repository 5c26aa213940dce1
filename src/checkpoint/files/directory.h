#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files/disk.h"
#include "checkpoint/files/manifest.h"

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

/// The boxes number `first`, `first` + `stride`, … of all boxes of a checkpoint.
struct BoxShare {
  std::size_t first = 0;
  std::size_t stride = 1;
};

/// Checks the checksums of these boxes, so that several ranks can share the work. Throws Error{kInvalid} that
/// names tensor and file, and what the disk throws.
void verify_data(const Disk& disk, const std::string& folder, const Manifest& manifest,
                 const BoxShare& share = {});

}  // namespace torchspan::checkpoint
