#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

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
};

/// Writes this rank's file of a save, and commits the save together with the other ranks: it becomes a
/// checkpoint for all ranks, or for none. Throws the same Error on all ranks, which names the ranks that
/// failed and their paths. If a rank dies, the others throw kDisconnected naming it.
class SaveRound {
 public:
  SaveRound(Ranks& ranks, const Directory& directory, Log& log)
      : ranks_(ranks), directory_(directory), log_(log) {}

  /// `data`: by entry of this rank's share. Returns the name of the checkpoint's folder.
  std::string run(const SaveJob& job, const std::vector<BytesView>& data, const Retention& retention);

 private:
  Bytes write(const SaveJob& job, const std::vector<BytesView>& data) const;
  std::string commit(const SaveJob& job, const std::vector<Bytes>& reports) const;
  void abandon(const SaveJob& job) const noexcept;

  Ranks& ranks_;
  const Directory& directory_;
  Log& log_;
};

}  // namespace torchspan::checkpoint
