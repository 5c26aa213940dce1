#pragma once
#include <atomic>
#include <memory>
#include <string>

#include <torchspan/detail/rpc/worker_backend.h>

#include "rpc/references/rref_message.h"

namespace torchspan::rpc {

class References;

/// Where an entry of the table came from, for lists of references.
struct Origin {
  const char* file = "";   ///< belongs to the program, or to References
  std::uint32_t line = 0;  ///< 0: the line is not known here
  bool copied = false;     ///< received from another worker, `from`, not made for this one
  std::uint32_t from = 0;
  TimePoint since{};
};

/// Holds a value on its owner: one that exists, or that a creation in flight will make.
class OwnerReference final : public Reference {
 public:
  OwnerReference(std::weak_ptr<WorkerBackend> backend, PeerId self, GlobalId value, std::uint64_t tag,
                 Origin origin);
  /// Sets the result or the failure of the creation. Only the first call counts.
  void set(ValuePtr value);
  void set_error(std::exception_ptr error) { promise_.set_error(std::move(error)); }
  /// Call both with the lock of References held.
  const Origin& origin() const { return origin_; }
  void set_origin(const Origin& origin) { origin_ = origin; }
  /// Returns the bytes of data, counted when the value was made.
  KnownSize size() const;

  bool is_owner() const override { return true; }
  std::uint32_t owner() const override { return self_.rank; }
  GlobalId value_id() const override { return value_; }
  GlobalId fork_id() const override { return {}; }
  std::uint64_t type_tag() const override { return tag_; }
  Future<void> ready() const override;
  ValuePtr value(Deadline deadline) const override { return slot_.wait(deadline); }
  std::shared_ptr<WorkerBackend> backend() const override;
  void abandon(const std::exception_ptr& reason) override { promise_.set_error(reason); }

 private:
  const std::weak_ptr<WorkerBackend> backend_;
  const PeerId self_;
  const GlobalId value_;
  const std::uint64_t tag_;
  Origin origin_;
  std::atomic<std::int64_t> size_{-1};
  Promise<ValuePtr> promise_;
  Future<ValuePtr> slot_;
};

/// A user's fork of a value on another worker. Its destructor reports the end to the owner.
class UserReference final : public Reference {
 public:
  struct Ids {
    PeerId owner;
    GlobalId value;
    GlobalId fork;
    std::uint64_t tag = 0;
  };
  UserReference(std::weak_ptr<WorkerBackend> backend, std::weak_ptr<References> references, Ids ids,
                Origin origin);
  ~UserReference() override;
  void confirm() { ready_.set_value(); }
  void fail(std::exception_ptr error) { ready_.set_error(std::move(error)); }
  /// Detaches the reference when its worker shuts down: every later use throws, and the destructor sends
  /// nothing.
  void detach() { detached_.store(true, std::memory_order_release); }
  PeerId owner_peer() const { return ids_.owner; }
  const Origin& origin() const { return origin_; }

  bool is_owner() const override { return false; }
  std::uint32_t owner() const override { return ids_.owner.rank; }
  GlobalId value_id() const override { return ids_.value; }
  GlobalId fork_id() const override { return ids_.fork; }
  std::uint64_t type_tag() const override { return ids_.tag; }
  Future<void> ready() const override { return ready_future_; }
  bool copied() const override { return origin_.copied; }
  ValuePtr value(Deadline deadline) const override;
  std::shared_ptr<WorkerBackend> backend() const override;
  void name_type(const std::string& name) const override;
  void abandon(const std::exception_ptr& reason) override { ready_.set_error(reason); }

 private:
  const std::weak_ptr<WorkerBackend> backend_;
  const std::weak_ptr<References> references_;
  const Ids ids_;
  const Origin origin_;
  Promise<void> ready_;
  Future<void> ready_future_;
  std::atomic<bool> detached_{false};
};

}  // namespace torchspan::rpc
