#include "rpc/references.h"

#include <fmt/format.h>

#include <torchspan/rpc/worker.h>

#include "rpc/control.h"

namespace torchspan::rpc {
namespace {

constexpr int kControlAttempts = 6;
constexpr Duration kAuditPatience = std::chrono::seconds(10);
constexpr Duration kReconnectDelay = std::chrono::milliseconds(100);
constexpr Duration kFirstAttempt = std::chrono::seconds(1);

std::weak_ptr<FutureHost> host_of(const std::weak_ptr<Endpoint>& endpoint) {
  auto alive = endpoint.lock();
  return alive ? alive->host() : std::weak_ptr<FutureHost>();
}

Request to_request(const RRefMessage& message) {
  switch (message.kind) {
    case RRefMessage::Kind::kForkRequest:
      return make_request(ForkRequest{message.value, message.fork});
    case RRefMessage::Kind::kChildAccept:
      return make_request(ChildAccept{message.value, message.fork});
    case RRefMessage::Kind::kUserDelete:
      break;
  }
  return make_request(UserDelete{message.value, message.fork});
}

std::shared_ptr<Endpoint> require(const std::weak_ptr<Endpoint>& endpoint) {
  auto alive = endpoint.lock();
  if (!alive)
    throw Error(ErrorKind::kCancelled, "this RRef's worker was shut down; it cannot be used any more");
  return alive;
}

/// How long the given attempt waits for its acknowledgement.
Duration patience(int attempt) {
  Duration limit = kFirstAttempt;
  for (int i = 0; i < attempt; ++i) limit = limit * 3 / 2;
  return limit;
}

}  // namespace

OwnerReference::OwnerReference(std::weak_ptr<Endpoint> endpoint, std::uint32_t self, GlobalId value,
                               std::uint64_t tag)
    : endpoint_(std::move(endpoint)),
      self_(self),
      value_(value),
      tag_(tag),
      promise_(host_of(endpoint_)),
      slot_(promise_.future()) {}

Future<void> OwnerReference::ready() const {
  if (slot_.done()) {
    return slot_.error() ? make_failed_future<void>(slot_.error()) : make_ready_future<void>();
  }
  return slot_.then([](Future<ValuePtr> value) { value.wait(); });
}

std::shared_ptr<Endpoint> OwnerReference::endpoint() const { return require(endpoint_); }

UserReference::UserReference(std::weak_ptr<Endpoint> endpoint, std::weak_ptr<References> references, Ids ids)
    : endpoint_(std::move(endpoint)),
      references_(std::move(references)),
      ids_(ids),
      ready_(host_of(endpoint_)),
      ready_future_(ready_.future()) {}

UserReference::~UserReference() {
  if (detached_.load(std::memory_order_acquire)) return;
  if (auto references = references_.lock()) references->release(ids_);
}

ValuePtr UserReference::value(Deadline) const {
  auto alive = endpoint();
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("local_value() of a value that lives on worker '{}' was asked for on worker '{}'; call a "
                  "function on the RRef there, or fetch a copy with to_here()",
                  alive->name_of(ids_.owner), alive->self().name));
}

std::shared_ptr<Endpoint> UserReference::endpoint() const {
  if (detached_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kCancelled,
                "this RRef was given back when its worker shut down; it cannot be used any more");
  }
  return require(endpoint_);
}

References::References(std::weak_ptr<Endpoint> endpoint, std::uint32_t self)
    : endpoint_(std::move(endpoint)), self_(self), table_(self) {}

void References::begin(std::uint32_t self, std::uint32_t incarnation) {
  MutexLock lock(mutex_);
  self_ = self;
  table_.begin(self, incarnation);
}

GlobalId References::next_id() {
  MutexLock lock(mutex_);
  return table_.next_id();
}

ReferencePtr References::own(ValuePtr value, std::uint64_t tag) {
  const GlobalId id = next_id();
  auto owner = std::make_shared<OwnerReference>(endpoint_, self_, id, tag);
  owner->set(std::move(value));
  return owner;
}

std::shared_ptr<OwnerReference> References::begin_own_creation(std::uint64_t tag) {
  MutexLock lock(mutex_);
  auto owner = std::make_shared<OwnerReference>(endpoint_, self_, table_.next_id(), tag);
  table_.expect_owner(owner->value_id(), owner);
  return owner;
}

void References::own_creation_failed(const std::shared_ptr<OwnerReference>& owner, std::exception_ptr error) {
  owner->set_error(std::move(error));
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.creation_arrived(owner->value_id(), effects);
  }
  apply(std::move(effects));
}

std::shared_ptr<UserReference> References::begin_creation(std::uint32_t to, std::uint64_t tag) {
  GlobalId value, fork;
  {
    MutexLock lock(mutex_);
    value = table_.next_id();
    fork = table_.next_id();
  }
  auto user =
      std::make_shared<UserReference>(endpoint_, weak_from_this(), UserReference::Ids{to, value, fork, tag});
  MutexLock lock(mutex_);
  table_.add_pending_user(fork, user);
  users_[fork] = user;
  return user;
}

void References::created(const std::shared_ptr<UserReference>& user) {
  user->confirm();
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.confirm_user(user->fork_id(), effects);
  }
  apply(std::move(effects));
}

void References::creation_failed(const std::shared_ptr<UserReference>& user, std::exception_ptr error) {
  user->fail(std::move(error));
  created(
      user);  // the creation may have happened over there all the same: its fork is deleted like any other
}

std::shared_ptr<OwnerReference> References::arriving_creation(GlobalId value, GlobalId fork,
                                                              std::uint32_t holder, std::uint64_t tag) {
  auto owner = std::make_shared<OwnerReference>(endpoint_, self_, value, tag);
  RRefTable::Effects effects;  // destroyed after the lock
  MutexLock lock(mutex_);
  if (auto known = std::static_pointer_cast<OwnerReference>(table_.find_owner(value)))
    owner = std::move(known);
  if (holder != self_) table_.add_fork(value, fork, holder, owner);
  table_.creation_arrived(value, effects);  // it is here
  return owner;
}

wire::Handle References::to_handle(const std::shared_ptr<void>& reference, std::uint32_t to) {
  auto state = std::static_pointer_cast<Reference>(reference);
  if (!state) return {};
  wire::Handle handle{state->owner(), state->value_id(), {}, state->type_tag()};
  if (!state->is_owner()) {
    state->endpoint();  // a deleted reference cannot travel
    const Future<void> ready = state->ready();
    if (ready.done()) ready.wait();  // nor can one whose creation failed
  }
  MutexLock lock(mutex_);
  if (state->is_owner()) {
    handle.fork = table_.next_id();
    table_.add_fork(handle.value, handle.fork, to, reference);
  } else {
    handle.fork = table_.send_child(reference, to);
  }
  return handle;
}

std::vector<wire::Handle> References::to_handles(const std::vector<std::shared_ptr<void>>& references,
                                                 std::uint32_t to) {
  std::vector<wire::Handle> handles;
  handles.reserve(references.size());
  try {
    for (const auto& reference : references) handles.push_back(to_handle(reference, to));
  } catch (...) {
    undo(handles);
    throw;
  }
  return handles;
}

void References::undo(const std::vector<wire::Handle>& handles) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    for (const wire::Handle& handle : handles) {
      if (handle.owner == self_) {
        table_.on_user_delete(handle.value, handle.fork, effects);
      } else {
        table_.undo_child(handle.fork, effects);
      }
    }
  }
  apply(std::move(effects));
}

void References::refuse_lost(const wire::Handle& handle, std::uint32_t from) const {
  MutexLock lock(mutex_);
  auto refused = refused_.find(from);
  if (refused == refused_.end() || !refused->second.contains(handle.fork)) return;
  throw Error(ErrorKind::kDisconnected,
              "a reference in this message was taken for lost when a connection broke; send it again");
}

std::shared_ptr<void> References::from_handle(const wire::Handle& handle, std::uint32_t from) {
  if (handle == wire::Handle{}) return nullptr;
  refuse_lost(handle, from);
  RRefTable::Effects effects;
  std::shared_ptr<void> result;
  if (handle.owner == self_) {
    auto fresh = std::make_shared<OwnerReference>(endpoint_, self_, handle.value, handle.type_tag);
    MutexLock lock(mutex_);
    result = table_.find_owner(handle.value);
    if (!result) {
      result = fresh;  // used before its creation arrived, which may be sent before the creation is confirmed
      table_.expect_owner(handle.value, result);
    }
    table_.accept_at_owner(handle, from, effects);
  } else {
    auto user = std::make_shared<UserReference>(
        endpoint_, weak_from_this(),
        UserReference::Ids{handle.owner, handle.value, handle.fork, handle.type_tag});
    result = user;
    MutexLock lock(mutex_);
    users_[handle.fork] = user;
    if (handle.owner == from) {
      user->confirm();
    } else {
      table_.adopt_child(handle, from, user, effects);
    }
  }
  apply(std::move(effects));
  return result;
}

std::vector<std::shared_ptr<void>> References::from_handles(const std::vector<wire::Handle>& handles,
                                                            std::uint32_t from) {
  std::vector<std::shared_ptr<void>> references;
  references.reserve(handles.size());
  for (const wire::Handle& handle : handles) references.push_back(from_handle(handle, from));
  return references;
}

void References::on_fork_request(GlobalId value, GlobalId fork, std::uint32_t from) {
  MutexLock lock(mutex_);
  table_.on_fork_request(value, fork, from);
}

void References::on_child_accept(GlobalId fork) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.on_child_accept(fork, effects);
  }
  apply(std::move(effects));
}

void References::on_user_delete(GlobalId value, GlobalId fork) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.on_user_delete(value, fork, effects);
  }
  apply(std::move(effects));
}

void References::on_departure(std::uint32_t rank) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.on_departure(rank, effects);
    refused_.erase(rank);
  }
  apply(std::move(effects));
}

std::vector<GlobalId> References::on_fork_audit(const std::vector<GlobalId>& forks, std::uint32_t from) {
  std::vector<GlobalId> lost;
  MutexLock lock(mutex_);
  for (const GlobalId& fork : forks) {
    if (users_.contains(fork)) continue;
    refused_[from].insert(fork);
    lost.push_back(fork);
  }
  return lost;
}

/// Asks again when this connection breaks too.
class References::AuditCompletion final : public Completion {
 public:
  AuditCompletion(std::shared_ptr<References> owner, std::uint32_t peer, RRefTable::Forks asked)
      : owner_(std::move(owner)), peer_(peer), asked_(std::move(asked)) {}
  void succeed(wire::Payload& reply) override {
    owner_->audited(peer_, asked_, wire::from_payload<ForkAudit::Reply>(reply));
  }
  void fail(std::exception_ptr) override {
    auto endpoint = owner_->endpoint_.lock();
    if (!endpoint || !endpoint->is_present(peer_)) return owner_->audited(peer_, asked_, {});
    endpoint->after(kReconnectDelay, [owner = owner_, peer = peer_] { owner->audit(peer); });
  }

 private:
  const std::shared_ptr<References> owner_;
  const std::uint32_t peer_;
  const RRefTable::Forks asked_;
};

void References::on_broken(std::uint32_t rank) {
  {
    MutexLock lock(mutex_);
    auto [it, fresh] = audits_.emplace(rank, false);
    it->second = !fresh;  // one is under way: once more after it
    if (!fresh) return;
  }
  audit(rank);
}

void References::audit(std::uint32_t rank) {
  RRefTable::Forks asked;
  {
    MutexLock lock(mutex_);
    asked = table_.forks_at(rank);
  }
  auto endpoint = endpoint_.lock();
  if (!endpoint || asked.empty()) return audited(rank, {}, {});
  ForkAudit question;
  for (const auto& [fork, value] : asked) question.forks.push_back(fork);
  Request request = make_request(question);
  request.deadline = endpoint->runtime().executor.deadline_in(kAuditPatience);
  endpoint->send(rank, std::move(request),
                 std::make_shared<AuditCompletion>(shared_from_this(), rank, std::move(asked)));
}

void References::audited(std::uint32_t rank, const RRefTable::Forks& asked,
                         const std::vector<GlobalId>& lost) {
  RRefTable::Effects effects;
  bool again = false;
  {
    MutexLock lock(mutex_);
    for (const GlobalId& fork : lost) {
      if (auto it = asked.find(fork); it != asked.end()) table_.on_lost(it->second, fork, effects);
    }
    auto it = audits_.find(rank);
    again = it != audits_.end() && it->second;
    if (it != audits_.end()) audits_.erase(it);
  }
  apply(std::move(effects));
  if (again) on_broken(rank);
}

void References::release(const UserReference::Ids& ids) {
  {
    MutexLock lock(mutex_);
    users_.erase(ids.fork);
  }
  send({RRefMessage::Kind::kUserDelete, ids.owner, ids.value, ids.fork}, 0);
}

RRefTable::Counts References::counts() const {
  MutexLock lock(mutex_);
  return table_.counts();
}

std::vector<RRefTable::Leak> References::leaks() const {
  MutexLock lock(mutex_);
  return table_.leaks();
}

bool References::settled() const {
  MutexLock lock(mutex_);
  const auto counts = table_.counts();
  return counts.pending_users == 0 && counts.pending_children == 0 && in_flight_ == 0 && audits_.empty();
}

void References::delete_users() {
  std::vector<std::shared_ptr<UserReference>> living;
  {
    MutexLock lock(mutex_);
    for (const auto& [fork, user] : users_) {
      if (auto alive = user.lock()) living.push_back(std::move(alive));
    }
    users_.clear();
  }
  for (const auto& user : living) {
    user->detach();
    send({RRefMessage::Kind::kUserDelete, user->owner(), user->value_id(), user->fork_id()}, 0);
  }
}

void References::clear() {
  RRefTable::Effects effects;
  std::map<GlobalId, std::weak_ptr<UserReference>> users;
  {
    MutexLock lock(mutex_);
    table_.clear(effects);
    users.swap(users_);
  }
  for (const auto& [fork, user] : users) {
    if (auto alive = user.lock()) alive->detach();
  }
  // Calls that wait for a reference hold it too: they let go when it is settled.
  const auto reason = std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "this worker was shut down before the value came"));
  for (const auto& kept : effects.released) std::static_pointer_cast<Reference>(kept)->abandon(reason);
}

void References::acknowledged(const RRefMessage& message, std::exception_ptr error) {
  RRefTable::Effects effects;
  std::shared_ptr<UserReference> user;
  {
    MutexLock lock(mutex_);
    --in_flight_;
    if (message.kind != RRefMessage::Kind::kForkRequest) return;
    auto it = users_.find(message.fork);
    if (it != users_.end()) user = it->second.lock();
    table_.confirm_user(message.fork, effects);
  }
  if (user && error) user->fail(error);
  if (user && !error) user->confirm();
  apply(std::move(effects));
}

void References::apply(RRefTable::Effects effects) {
  for (const RRefMessage& message : effects.messages) send(message, 0);
}

/// Sends again what timed out or lost its connection; a peer that is gone needs no answer.
class References::ControlCompletion final : public Completion {
 public:
  ControlCompletion(std::shared_ptr<References> owner, RRefMessage message, int attempt)
      : owner_(std::move(owner)), message_(message), attempt_(attempt) {}
  void succeed(wire::Payload&) override { owner_->acknowledged(message_, nullptr); }
  void fail(std::exception_ptr error) override {
    const ErrorKind kind = to_error(error).kind();
    const bool lost = kind == ErrorKind::kDisconnected;
    auto endpoint = owner_->endpoint_.lock();
    const bool again = lost || (kind == ErrorKind::kTimedOut && attempt_ + 1 < kControlAttempts);
    if (!endpoint || !again || !endpoint->is_present(message_.to))
      return owner_->acknowledged(message_, error);
    endpoint->after(lost ? kReconnectDelay : Duration::zero(),
                    [owner = owner_, message = message_, next = lost ? attempt_ : attempt_ + 1] {
                      owner->send(message, next);
                      MutexLock lock(owner->mutex_);
                      --owner->in_flight_;
                    });
  }

 private:
  std::shared_ptr<References> owner_;
  const RRefMessage message_;
  const int attempt_;
};

void References::send(const RRefMessage& message, int attempt) {
  auto endpoint = endpoint_.lock();
  if (!endpoint) return;
  {
    MutexLock lock(mutex_);
    ++in_flight_;
  }
  Request request = to_request(message);
  request.deadline = endpoint->runtime().executor.deadline_in(patience(attempt));
  endpoint->send(message.to, std::move(request),
                 std::make_shared<ControlCompletion>(shared_from_this(), message, attempt));
}

}  // namespace torchspan::rpc
