#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/rpc/message.h>
#include <torchspan/detail/rpc/reference_wire.h>
#include <torchspan/rpc/worker.h>

#include "checkpoint/commit/rounds.h"

namespace torchspan::checkpoint {

/// A value of the receiver, and the name of its tensors in the checkpoint.
struct RemoteItem {
  static constexpr FixedString kWireName = "checkpoint.RemoteItem";
  rpc::ReferencePtr value;
  std::string name;
};

/// Lists the tensors of values that the receiver owns.
struct ListTensors {
  static constexpr wire::MessageType kType{0x0501};
  static constexpr std::string_view kName = "checkpoint.list";
  static constexpr FixedString kWireName = "checkpoint.ListTensors";
  using Reply = std::string;  ///< an encoded Listing
  std::vector<RemoteItem> items;
};

/// Copies tensors of values that the receiver owns, for the WriteSnapshot with this id.
struct TakeSnapshot {
  static constexpr wire::MessageType kType{0x0502};
  static constexpr std::string_view kName = "checkpoint.snapshot";
  static constexpr FixedString kWireName = "checkpoint.TakeSnapshot";
  using Reply = Unit;
  GlobalId id;
  std::vector<RemoteItem> items;
  std::vector<std::string> names;  ///< of the tensors, in the order of the file
  std::vector<std::string> keys;   ///< their names in the file
};

/// Writes a snapshot to a file.
struct WriteSnapshot {
  static constexpr wire::MessageType kType{0x0503};
  static constexpr std::string_view kName = "checkpoint.write";
  static constexpr FixedString kWireName = "checkpoint.WriteSnapshot";
  using Reply = std::string;  ///< an encoded FileReport
  GlobalId id;
  std::string path;
};

struct DropSnapshot {
  static constexpr wire::MessageType kType{0x0504};
  static constexpr std::string_view kName = "checkpoint.drop";
  static constexpr FixedString kWireName = "checkpoint.DropSnapshot";
  using Reply = Unit;
  GlobalId id;
};

/// Loads values that the receiver owns from a checkpoint's folder.
struct LoadTensors {
  static constexpr wire::MessageType kType{0x0505};
  static constexpr std::string_view kName = "checkpoint.load";
  static constexpr FixedString kWireName = "checkpoint.LoadTensors";
  using Reply = Unit;
  std::string folder;
  std::vector<RemoteItem> items;
};

using RemoteValues = std::vector<std::pair<std::string, RemoteValue>>;

/// The caller's side of values on other workers: lists, copies, writes and loads them there. Errors name the
/// worker.
class Owners {
 public:
  Owners(Worker worker, Duration timeout) : worker_(std::move(worker)), timeout_(timeout) {}
  ~Owners();
  Owners(const Owners&) = delete;
  Owners& operator=(const Owners&) = delete;

  /// The tensors of the values, with their owners.
  Listing list(const RemoteValues& values) const;
  /// Makes the owners copy what `rank` lets them write.
  void snapshot(const RemoteValues& values, const SaveJob& job, std::size_t rank);
  /// Drops snapshots that were not written.
  void release() noexcept;
  Future<std::string> write(const Plan::Share& share, const std::string& path);
  void load(const std::string& folder, const std::string& name, const RemoteValue& value) const;

 private:
  Deadline deadline() const { return worker_.runtime().executor.deadline_in(timeout_); }
  std::string owner_of(const RemoteValue& value) const;

  const Worker worker_;
  const Duration timeout_;
  std::map<std::string, GlobalId> snapshots_;  ///< by owner
};

}  // namespace torchspan::checkpoint
