#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/worker_backend.h>

#include "rpc/references/rref_table.h"

namespace torchspan::rpc {

/// Returns the name of a control message on the wire.
std::string_view name_of(RRefMessage::Kind kind);

/// Carries out the effects of operations on the table: sends control messages until they are answered or
/// their receiver is gone, fails references, releases values. Thread-safe; its lock and the table's are never
/// held together.
class RRefDriver : public std::enable_shared_from_this<RRefDriver> {
 public:
  RRefDriver(std::weak_ptr<WorkerBackend> backend, std::shared_ptr<SharedRRefTable> shared)
      : backend_(std::move(backend)), shared_(std::move(shared)) {}

  /// Calls `change(table, effects)` with the table's lock held, then carries out the effects.
  template <class Change>
  void change(Change&& change) {
    RRefTable::Effects effects;
    {
      MutexLock lock(shared_->mutex);
      change(shared_->table, effects);
    }
    apply(std::move(effects));
  }
  /// Releases references on a thread where the destructors of values may wait.
  void release_references(std::vector<std::shared_ptr<void>> references) const;
  /// Makes the error for a value that is not available.
  Error refused(GlobalId value, const Refusal& refusal) const;

  /// Handles a control message. For a fork request, returns why the fork is not counted, or nullopt.
  std::optional<Error> receive(const RRefMessage& message, PeerId from);
  /// Handles a broken connection to a worker that is present: asks it which references were lost with it.
  void on_broken(std::uint32_t rank);
  std::vector<GlobalId> on_fork_audit(const std::vector<GlobalId>& forks, PeerId from);

  /// Prepares for this worker's shutdown: from now on, gives up an unanswered message after several attempts.
  /// With `alone`, the others stay, and it also gives up audits after several attempts.
  void leave(bool alone);
  /// Whether no message is in flight.
  bool idle() const;
  /// Describes the messages without an answer so far, in one line per kind and receiver, for logs.
  std::vector<std::string> outstanding() const;

 private:
  class ControlCompletion;
  class AuditCompletion;
  /// When a failed message is sent again, and the number of that attempt.
  struct Again {
    Duration pause{0};
    int attempt = 0;
  };
  void apply(RRefTable::Effects effects);
  void send(const RRefMessage& message, int attempt);
  void answered(const RRefMessage& message, const std::exception_ptr& refusal);
  void not_in_flight(const RRefMessage& message);
  /// Returns nullopt if the message is given up.
  std::optional<Again> send_again(const RRefMessage& message, int attempt, ErrorKind why) const;
  void audit(PeerId peer, int attempt);
  void audited(PeerId peer, const RRefTable::Forks& asked, const std::vector<GlobalId>& lost);
  std::optional<Again> audit_again(int attempt) const;
  void give_up_audit(PeerId peer);
  PeerId latest(std::uint32_t rank) const;

  const std::weak_ptr<WorkerBackend> backend_;
  const std::shared_ptr<SharedRRefTable> shared_;
  mutable Mutex mutex_;
  std::map<std::pair<PeerId, RRefMessage::Kind>, std::size_t> in_flight_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<PeerId, bool> audits_ TORCHSPAN_GUARDED_BY(mutex_);  ///< in progress; true: repeat it when it ends
  bool leaving_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool alone_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::rpc
