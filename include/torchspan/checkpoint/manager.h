#pragma once
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/time.h>
#include <torchspan/rpc/worker.h>

namespace torchspan {

struct CheckpointOptions {
  /// Folder of the checkpoints, on a file system that all ranks share; required. It is created if missing.
  std::string directory;
  int keep_last = 3;            ///< number of newest checkpoints to keep; at least 1
  int keep_best = 0;            ///< number of checkpoints with the best metric to keep in addition
  bool lower_is_better = true;  ///< of SaveOptions::metric
  /// save() returns once the state is copied, and a thread writes the copy. Otherwise it returns when the
  /// checkpoint is complete, and copies nothing.
  bool asynchronous = true;
  bool rng = true;  ///< also saves the states of LibTorch's default generators of every rank
  /// Names of the workers that have this manager; empty: all. The one with the lowest rank commits.
  std::vector<std::string> participants = {};
  std::string name = "manager";  ///< unique among the managers of one set of workers
  /// Limit of each wait for the other ranks. A rank that writes slowly counts as late, too. 0: no limit.
  Duration timeout = std::chrono::minutes(30);
};

struct SaveOptions {
  std::optional<double> metric = {};  ///< for CheckpointOptions::keep_best; the committing rank's counts
};

/// Saves and restores the registered objects of all ranks as one checkpoint, which exists for all ranks or for
/// none. Every participant registers its objects under the same names and calls save() and restore() in the same
/// order, from one thread. Replicas (same name, same shape) are written once. Registered objects must outlive
/// the manager. See docs/checkpoints.md.
class CheckpointManager {
 public:
  CheckpointManager(const Worker& worker, CheckpointOptions options);
  /// For a program of one process without a session.
  explicit CheckpointManager(CheckpointOptions options);
  /// Waits until the last save() is complete; logs its failure.
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  /// Registers an object that is replicated, or that this rank has a part of (checkpoint/sources.h lists the
  /// types). Its names in the checkpoint begin with `name`.
  template <class T>
  void add(std::string name, T& object) {
    add_source(std::move(name), checkpoint::source_of(object));
  }
  /// Registers an object whose state differs between ranks, such as a data sampler. It can be restored only by as many
  /// ranks as saved it. For a DistributedOptimizer this is add(), which saves the state of each trainer, and which any number
  /// of ranks restores: a new trainer gets a copy of another one's state, and a warning.
  template <class T>
  void add_per_rank(const std::string& name, T& object) {
    add_source_per_rank(name, checkpoint::source_of(object));
  }
  /// Registers any other state. Throws Error{kInvalid} if the name is taken, or begins with the name and a dot of an
  /// object that owns the names below its own (StateSource::owns_names()), or the reverse.
  void add_source(std::string name, checkpoint::SourcePtr source);
  void add_source_per_rank(const std::string& name, checkpoint::SourcePtr source);

  /// Saves the state after `step` steps. If the previous asynchronous save failed, throws its error instead,
  /// on all ranks. Throws Error{kInvalid} on all ranks if they disagree about the step or a value.
  void save(std::int64_t step, SaveOptions options = {});
  /// Returns when the last save() is a checkpoint; throws if it failed.
  void wait();

  /// Restores the newest checkpoint whose checksums match, and returns its step; nullopt if there is none.
  /// Logs a warning for each newer one that is damaged. Throws on all ranks if an object does not fit, or if
  /// all checkpoints are damaged.
  std::optional<std::int64_t> restore();
  /// The same, or returns `first_step` if there is no checkpoint.
  std::int64_t restore_or(std::int64_t first_step) { return restore().value_or(first_step); }

  class Impl;

 private:
  const ProcessOwned<Impl> impl_;
};

/// A complete checkpoint, for programs that inspect, export or serve it in one process. Reads the folder of a
/// step, written by any number of ranks. Cheap to copy; not thread-safe.
class Checkpoint {
 public:
  /// Checks the manifest and the sizes and headers of all files; Error{kInvalid} names what is damaged.
  explicit Checkpoint(std::string folder);
  /// The newest checkpoint in a directory whose checksums match. Throws Error{kInvalid} if there is none.
  static Checkpoint newest(const std::string& directory);
  /// Folders of the checkpoints in a directory, newest first; not checked.
  static std::vector<std::string> list(const std::string& directory);

  const std::string& folder() const { return folder_; }
  std::int64_t step() const;
  /// Number of ranks that saved it.
  int world_size() const;
  std::optional<double> metric() const;
  /// Checks the checksums of all data; throws Error{kInvalid} that names tensor and file.
  void verify() const;

  std::vector<std::string> names() const;
  /// A whole tensor; shards are put together. Shares memory with no other tensor. See StateReader::read().
  at::Tensor read(const std::string& name) const;
  const std::map<std::string, checkpoint::Value>& values() const;
  /// Restores an object that was saved under `name`: checkpoint.load("model", net).
  template <class T>
  void load(const std::string& name, T& object) const {
    load_source(name, *checkpoint::source_of(object));
  }
  void load_source(const std::string& name, checkpoint::StateSource& source) const;

 private:
  struct Content;
  std::string folder_;
  std::shared_ptr<Content> content_;
};

}  // namespace torchspan
