#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/channels/group_links.h"
#include "collective/channels/inbox.h"
#include "collective/channels/messages.h"
#include "collective/world_link.h"

namespace torchspan::collective::channels {

struct MeshOptions {
  Duration timeout = std::chrono::minutes(5);
  int lanes = 0;  ///< of this rank; 0: 4 with 8 cores or more, else 2. A group uses the smallest number.
  ConnectionRounds rounds = {};
};

/// Connections between all ranks of a group over several lanes, each with its GroupLinks, and thus its thread. Announces the
/// first failure to all ranks. One thread at a time sends and takes; everything else is thread-safe.
class Mesh final : private LinkListener {
 public:
  /// Collective over `ranks` of the world, which include this worker. Throws kDisconnected on all ranks,
  /// with the connections that could not be made; kTimedOut.
  Mesh(const std::shared_ptr<WorldLink>& world, const std::vector<int>& ranks, MeshOptions options);
  /// Sends the last messages and waits briefly until the peers have them.
  ~Mesh();

  int rank() const { return rank_; }
  int size() const { return members_.size(); }
  Inbox& inbox() { return inbox_; }
  Executor& executor() { return executor_; }

  /// Begins an operation, which all ranks begin in the same order. Its parts must be sent and taken before
  /// the group's timeout.
  void begin_operation();
  /// `calls`: number of the group's call that this rank executes.
  void begin_call(std::uint64_t calls);
  /// Sends a part, which lanes carry in turn. Waits while much is unsent. Throws the group's failure.
  void send(int to, std::uint32_t part, BytesView data);
  /// Waits for a part of `size` bytes.
  Buffer take(int from, std::uint32_t part, std::size_t size);

  /// Breaks the group on all ranks, for calls from `from_call` on: ranks complete earlier ones if they can.
  void abort(const Error& cause, std::uint64_t from_call = 0);
  /// Breaks the group on this rank; others fail when they need more from it.
  void end(const Error& reason);

 private:
  // On the lanes' threads:
  void on_met(GroupLinks&, int) override { connecting_->unpark(); }
  void on_group_message(GroupLinks& lane, int rank, const GroupMessage& message,
                        std::vector<Buffer> segments) override;
  void on_invalid(GroupLinks& lane, int rank, const Error& cause) override;
  void on_end(GroupLinks& lane, int rank, LinkEnd how, const Error& reason) override;
  void lost(int rank, const std::string& why);
  void refuse(const GroupLinks& lane, int rank, const Error& cause);

  int lane_of(std::uint32_t part) const { return static_cast<int>(part / 2) % lane_count_; }
  std::vector<std::string> listen(WorldLink& world, std::uint64_t nonce);
  std::optional<Error> connect(WorldLink& world, Deadline deadline);
  bool is_connected(GroupLinks& lane) const;
  /// Whether a connection cannot be made.
  bool is_refused();
  std::string why_missing(const GroupLinks& lane, int rank);
  void agree(WorldLink& world, std::optional<Error> mine, Deadline deadline);
  void wait_for_room(int to, GroupLinks& lane);
  /// Throws kDisconnected if the connection has ended.
  void send_over(GroupLinks& lane, int to, BytesView header, std::span<const Segment> segments);
  void stop_lanes(const char* why);

  Executor& executor_;
  const std::shared_ptr<WorldLink> world_;
  MeshOptions options_;
  const GroupMembers members_;
  const int rank_;
  const std::unique_ptr<Parker> connecting_;
  Inbox inbox_;
  Mutex mutex_;
  /// Why there is no connection, by number of the lane and rank.
  std::map<std::pair<int, int>, std::string> troubles_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<GroupLinks>> lanes_;
  int lane_count_ = 1;  ///< lanes that all ranks have
  std::uint64_t operation_ = 0;
  std::atomic<std::uint64_t> calls_{0};
  Deadline deadline_ = Deadline::never();
};

}  // namespace torchspan::collective::channels
