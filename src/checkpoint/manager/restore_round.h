#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/core/log.h>

#include "checkpoint/commit/outcomes.h"
#include "checkpoint/commit/ranks.h"
#include "checkpoint/files/directory.h"

namespace torchspan::checkpoint {

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
