#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/endpoint.h>

#include "rpc/references/shared_table.h"

namespace torchspan::rpc {

/// The name of a control message on the wire.
std::string_view name_of(RRefMessage::Kind kind);

/// Carries out what operations on the table leave to do: sends control messages until they are answered or
/// their receiver is gone, fails references, releases values. Thread-safe; its lock and the table's are never
/// held together.
class RRefDriver : public std::enable_shared_from_this<RRefDriver> {
 public:
  RRefDriver(std::weak_ptr<Endpoint> endpoint, std::shared_ptr<SharedRRefTable> shared)
      : endpoint_(std::move(endpoint)), shared_(std::move(shared)) {}

  void apply(RRefTable::Effects effects);
  /// Releases references on a thread where the destructors of values may wait.
  void let_go(std::vector<std::shared_ptr<void>> references) const;
  /// The error of a value that cannot be had.
  Error refused(GlobalId value, const Refusal& refusal) const;

  /// A control message came. The answer to a fork request: why it is not counted, or nothing.
  std::optional<Error> receive(const RRefMessage& message, PeerId from);
  /// A connection to a worker that lives broke: asks it which references were lost with it.
  void on_broken(std::uint32_t rank);
  std::vector<GlobalId> on_fork_audit(const std::vector<GlobalId>& forks, PeerId from);

  /// This worker shuts down: from now on it gives up messages that nobody answers, after several attempts.
  /// With `alone` the others stay, and it gives up questions after broken connections too.
  void leave(bool alone);
  /// Whether no message is in flight.
  bool idle() const;
  /// The messages without an answer so far, a line for each kind and receiver, for people.
  std::vector<std::string> outstanding() const;

 private:
  class ControlCompletion;
  class AuditCompletion;
  /// When a message that failed is sent again, and the number of that attempt.
  struct Again {
    Duration pause{0};
    int attempt = 0;
  };
  void send(const RRefMessage& message, int attempt);
  void answered(const RRefMessage& message, const std::exception_ptr& refusal);
  void not_in_flight(const RRefMessage& message);
  /// Nothing: it is given up.
  std::optional<Again> send_again(const RRefMessage& message, int attempt, ErrorKind why) const;
  void audit(PeerId peer, int attempt);
  void audited(PeerId peer, const RRefTable::Forks& asked, const std::vector<GlobalId>& lost);
  std::optional<Again> audit_again(int attempt) const;
  void give_up_audit(PeerId peer);

  const std::weak_ptr<Endpoint> endpoint_;
  const std::shared_ptr<SharedRRefTable> shared_;
  mutable Mutex mutex_;
  std::map<std::pair<PeerId, RRefMessage::Kind>, std::size_t> in_flight_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<PeerId, bool> audits_ TORCHSPAN_GUARDED_BY(mutex_);  ///< in progress; whether to repeat them
  bool leaving_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool alone_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::rpc
