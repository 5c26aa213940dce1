#pragma once
#include <cstdint>
#include <map>
#include <optional>
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
  std::optional<Error> failure = {};  ///< why this rank has nothing to write
};

/// Lets other workers write their files.
class RemoteFiles {
 public:
  virtual ~RemoteFiles() = default;
  /// Makes the owner of the share write the file; the future has an encoded FileReport.
  virtual Future<std::string> write(const Plan::Share& share, const std::string& path) = 0;
};

/// Writes this rank's file of a save, and commits the save together with the other ranks: it becomes a
/// checkpoint for all ranks, or for none. Throws the same Error on all ranks, which names the ranks that
/// failed and their paths. If a rank dies, the others throw kDisconnected naming it.
class SaveRound {
 public:
  SaveRound(Ranks& ranks, const Directory& directory, Log& log)
      : ranks_(ranks), directory_(directory), log_(log) {}

  /// `data`: the bytes of this rank's own share, as write_tensor_file() takes them. `remote` may be null if no share
  /// has an owner. Returns the name of the checkpoint's folder.
  std::string run(const SaveJob& job, const std::vector<BytesView>& data, const Retention& retention,
                  RemoteFiles* remote = nullptr);

 private:
  Bytes write(const SaveJob& job, const std::vector<BytesView>& data, RemoteFiles* remote) const;
  FileReport write_own(const Plan::Share& share, const std::string& folder,
                       const std::vector<BytesView>& data) const;
  std::string commit(const SaveJob& job, const std::vector<Bytes>& reports) const;
  void abandon(const SaveJob& job) const noexcept;

  Ranks& ranks_;
  const Directory& directory_;
  Log& log_;
};

}  // namespace torchspan::checkpoint
