#pragma once
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torchspan/core/mutex.h>
#include <torchspan/rpc/endpoint.h>

#include "rpc/rref_table.h"

namespace torchspan::rpc {

class References;

/// An owner's hold on a value that is there, or that a creation on its way will bring.
class OwnerReference final : public Reference {
 public:
  OwnerReference(std::weak_ptr<Endpoint> endpoint, std::uint32_t self, GlobalId value, std::uint64_t tag);
  /// The creation arrived: its result, or its failure. Only the first call counts.
  void set(ValuePtr value) { promise_.set_value(std::move(value)); }
  void set_error(std::exception_ptr error) { promise_.set_error(std::move(error)); }
  Future<ValuePtr> slot() const { return slot_; }

  bool is_owner() const override { return true; }
  std::uint32_t owner() const override { return self_; }
  GlobalId value_id() const override { return value_; }
  GlobalId fork_id() const override { return {}; }
  std::uint64_t type_tag() const override { return tag_; }
  Future<void> ready() const override;
  ValuePtr value(Deadline deadline) const override { return slot_.wait(deadline); }
  std::shared_ptr<Endpoint> endpoint() const override;
  void abandon(const std::exception_ptr& reason) override { promise_.set_error(reason); }

 private:
  std::weak_ptr<Endpoint> endpoint_;
  const std::uint32_t self_;
  const GlobalId value_;
  const std::uint64_t tag_;
  Promise<ValuePtr> promise_;
  Future<ValuePtr> slot_;
};

/// A user's fork of a value that lives elsewhere. Its destruction tells the owner.
class UserReference final : public Reference {
 public:
  struct Ids {
    std::uint32_t owner = 0;
    GlobalId value;
    GlobalId fork;
    std::uint64_t tag = 0;
  };
  UserReference(std::weak_ptr<Endpoint> endpoint, std::weak_ptr<References> references, Ids ids);
  ~UserReference() override;
  void confirm() { ready_.set_value(); }
  void fail(std::exception_ptr error) { ready_.set_error(std::move(error)); }
  /// The worker shut down: every later use throws, and the destructor is silent.
  void detach() { detached_.store(true, std::memory_order_release); }

  bool is_owner() const override { return false; }
  std::uint32_t owner() const override { return ids_.owner; }
  GlobalId value_id() const override { return ids_.value; }
  GlobalId fork_id() const override { return ids_.fork; }
  std::uint64_t type_tag() const override { return ids_.tag; }
  Future<void> ready() const override { return ready_future_; }
  ValuePtr value(Deadline deadline) const override;
  std::shared_ptr<Endpoint> endpoint() const override;
  void abandon(const std::exception_ptr& reason) override { ready_.set_error(reason); }

 private:
  std::weak_ptr<Endpoint> endpoint_;
  std::weak_ptr<References> references_;
  const Ids ids_;
  Promise<void> ready_;
  Future<void> ready_future_;
  std::atomic<bool> detached_{false};
};

/// Drives the table: turns references into handles before a send and handles into references after it, and
/// sends the protocol's messages. Thread-safe; its lock is never held while sending or destroying.
class References : public std::enable_shared_from_this<References> {
 public:
  References(std::weak_ptr<Endpoint> endpoint, std::uint32_t self);
  /// Before the first message: see RRefTable::begin.
  void begin(std::uint32_t self, std::uint32_t incarnation);

  GlobalId next_id();
  ReferencePtr own(ValuePtr value, std::uint64_t tag);
  /// The same for a value that a creation on this worker will bring.
  std::shared_ptr<OwnerReference> begin_own_creation(std::uint64_t tag);
  void own_creation_failed(const std::shared_ptr<OwnerReference>& owner, std::exception_ptr error);
  /// A user reference to a value that `to` will create; kept until created() or creation_failed().
  std::shared_ptr<UserReference> begin_creation(std::uint32_t to, std::uint64_t tag);
  void created(const std::shared_ptr<UserReference>& user);
  void creation_failed(const std::shared_ptr<UserReference>& user, std::exception_ptr error);

  /// Owner: the reference that a creation from `holder` fills.
  std::shared_ptr<OwnerReference> arriving_creation(GlobalId value, GlobalId fork, std::uint32_t holder,
                                                    std::uint64_t tag);

  /// Handles for references that travel to `to`. undo() takes them back after a failed send.
  std::vector<wire::Handle> to_handles(const std::vector<std::shared_ptr<void>>& references,
                                       std::uint32_t to);
  void undo(const std::vector<wire::Handle>& handles);
  /// References for handles that came from `from`.
  std::vector<std::shared_ptr<void>> from_handles(const std::vector<wire::Handle>& handles,
                                                  std::uint32_t from);

  void on_fork_request(GlobalId value, GlobalId fork, std::uint32_t from);
  void on_child_accept(GlobalId fork);
  void on_user_delete(GlobalId value, GlobalId fork);
  void on_departure(std::uint32_t rank);
  /// A connection to a worker that lives broke: asks it which references were lost with it.
  void on_broken(std::uint32_t rank);
  std::vector<GlobalId> on_fork_audit(const std::vector<GlobalId>& forks, std::uint32_t from);
  /// A user reference ended.
  void release(const UserReference::Ids& ids);

  RRefTable::Counts counts() const;
  std::vector<RRefTable::Leak> leaks() const;
  /// Whether nothing of the protocol is on its way.
  bool settled() const;
  /// Graceful shutdown: user references that the program still holds are given back to their owners now.
  void delete_users();
  void clear();

 private:
  class ControlCompletion;
  class AuditCompletion;
  void audit(std::uint32_t rank);
  void audited(std::uint32_t rank, const RRefTable::Forks& asked, const std::vector<GlobalId>& lost);
  void acknowledged(const RRefMessage& message, std::exception_ptr error);
  void apply(RRefTable::Effects effects);
  void send(const RRefMessage& message, int attempt);
  void refuse_lost(const wire::Handle& handle, std::uint32_t from) const;
  wire::Handle to_handle(const std::shared_ptr<void>& reference, std::uint32_t to);
  std::shared_ptr<void> from_handle(const wire::Handle& handle, std::uint32_t from);

  const std::weak_ptr<Endpoint> endpoint_;
  std::uint32_t self_;
  mutable Mutex mutex_;
  RRefTable table_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<GlobalId, std::weak_ptr<UserReference>> users_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint32_t, std::set<GlobalId>> refused_
      TORCHSPAN_GUARDED_BY(mutex_);                                    ///< by sender: told lost
  std::map<std::uint32_t, bool> audits_ TORCHSPAN_GUARDED_BY(mutex_);  ///< under way; whether once more
  std::size_t in_flight_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::rpc
