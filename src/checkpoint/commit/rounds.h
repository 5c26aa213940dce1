#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/core/log.h>

#include "checkpoint/commit/listing.h"
#include "checkpoint/commit/ranks.h"
#include "checkpoint/files/directory.h"

namespace torchspan::checkpoint {

/// One save, agreed on by all ranks.
struct SaveJob {
  std::int64_t step = 0;
  std::uint64_t token = 0;  ///< the same on all ranks; new for every save
  std::optional<double> metric = {};
  std::map<std::string, Value> values = {};
  std::vector<Listing> listings = {};  ///< by rank
  Plan plan = {};
  std::uint64_t departures = 0;       ///< Ranks::departures() when the ranks began to agree
  std::optional<Error> failure = {};  ///< why this rank has nothing to write
};

/// Makes the owner of the share write the file; the future has an encoded FileReport.
using WriteOnOwner = std::function<Future<std::string>(const Plan::Share& share, const std::string& path)>;

/// Writes this rank's file of a save, and commits the save together with the other ranks: it becomes a
/// checkpoint for all ranks, or for none. Throws the same Error on all ranks, which names the ranks that
/// failed and their paths. If a rank dies, the others throw kDisconnected naming it.
class SaveRound {
 public:
  SaveRound(Ranks& ranks, const Directory& directory, Log& log)
      : ranks_(ranks), directory_(directory), log_(log) {}

  /// `data`: the bytes of this rank's own share, as write_tensor_file() takes them. `write_on_owner` may be empty if no
  /// share has an owner. Returns the name of the checkpoint's folder.
  std::string run(const SaveJob& job, const std::vector<BytesView>& data, const Retention& retention,
                  const WriteOnOwner& write_on_owner = {});

 private:
  Bytes write(const SaveJob& job, const std::vector<BytesView>& data,
              const WriteOnOwner& write_on_owner) const;
  FileReport write_own(const Plan::Share& share, const std::string& folder,
                       const std::vector<BytesView>& data) const;
  std::string commit(const SaveJob& job, const std::vector<Bytes>& reports) const;
  void abandon(const SaveJob& job) const noexcept;

  Ranks& ranks_;
  const Directory& directory_;
  Log& log_;
};

/// Chooses, checks and loads a checkpoint together with the other ranks: the first rank chooses the newest one,
/// all of them check a part of its data, and it is loaded only if every part is right.
class RestoreRound {
 public:
  /// Loads a checkpoint; returns what this rank has read, as FolderReader::usage().
  using Load = std::function<Bytes(const std::string& folder, const Manifest& manifest)>;

  RestoreRound(Ranks& ranks, const Directory& directory, Log& log)
      : ranks_(ranks), directory_(directory), log_(log) {}

  /// Returns the step that `load` was called for on all ranks; nullopt if there is no checkpoint. Throws the same
  /// Error on all ranks if `load` threw on one, or if no checkpoint is undamaged.
  std::optional<std::int64_t> run(const Load& load);

 private:
  /// The newest checkpoint not yet rejected; empty: none.
  std::string propose();
  void reject(const std::string& name, const std::string& why);
  /// Logs a warning for tensors that no rank has read.
  void report_unused(const std::string& name, const Manifest& manifest,
                     const std::vector<RankOutcome>& loaded) const;

  Ranks& ranks_;
  const Directory& directory_;
  Log& log_;
  std::set<std::string> rejected_;
  std::string first_reason_;
};

}  // namespace torchspan::checkpoint
