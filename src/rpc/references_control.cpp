#include <algorithm>

#include "rpc/control.h"
#include "rpc/references.h"

namespace torchspan::rpc {
namespace {

/// How often a message goes unanswered, or does not leave, before a worker that shuts down goes on without.
constexpr int kLastAttempts = 6;
/// How often a worker is looked for whose joining has not been heard of.
constexpr int kLookedFor = 50;
constexpr Duration kAuditPatience = std::chrono::seconds(10);
constexpr Duration kReconnectDelay = std::chrono::milliseconds(100);
constexpr Duration kFirstAttempt = std::chrono::seconds(1);
constexpr Duration kLongestAttempt = std::chrono::seconds(10);

Request to_request(const RRefMessage& message) {
  switch (message.kind) {
    case RRefMessage::Kind::kForkRequest:
      return make_request(ForkRequest{message.value, message.fork, message.to.incarnation, message.number});
    case RRefMessage::Kind::kChildAccept:
      return make_request(ChildAccept{message.value, message.fork});
    case RRefMessage::Kind::kGivenUp:
      return make_request(CreationGivenUp{message.value, message.fork, message.reason});
    case RRefMessage::Kind::kUserDelete:
      break;
  }
  return make_request(UserDelete{message.value, message.fork});
}

/// How long the given attempt waits for its answer.
Duration patience(int attempt) {
  Duration limit = kFirstAttempt;
  for (int i = 0; i < attempt && limit < kLongestAttempt; ++i) limit = limit * 3 / 2;
  return std::min(limit, kLongestAttempt);
}

/// After how long a worker that leaves tries the given time to reach a peer again: in all a peer that refuses
/// connections has about as much time as one that is silent.
Duration last_pause(int attempt) { return kReconnectDelay * (1 << std::min(2 * attempt, 6)); }

}  // namespace

std::string_view name_of(RRefMessage::Kind kind) {
  switch (kind) {
    case RRefMessage::Kind::kForkRequest:
      return ForkRequest::kName;
    case RRefMessage::Kind::kChildAccept:
      return ChildAccept::kName;
    case RRefMessage::Kind::kGivenUp:
      return CreationGivenUp::kName;
    case RRefMessage::Kind::kUserDelete:
      break;
  }
  return UserDelete::kName;
}

std::optional<Error> References::receive(const RRefMessage& message, PeerId from) {
  RRefTable::Effects effects;
  std::optional<Refusal> refusal;
  {
    MutexLock lock(mutex_);
    RRefMessage here = message;
    if (here.kind != RRefMessage::Kind::kForkRequest) here.to = table_.self();
    here.to.rank = table_.self().rank;
    refusal = table_.receive(here, from, effects);
  }
  apply(std::move(effects));
  if (!refusal) return std::nullopt;
  return refused(message.value, *refusal);
}

std::vector<GlobalId> References::on_fork_audit(const std::vector<GlobalId>& forks, PeerId from) {
  MutexLock lock(mutex_);
  return table_.held().missing(forks, from);
}

/// Asks again when this connection breaks too.
class References::AuditCompletion final : public Completion {
 public:
  AuditCompletion(std::shared_ptr<References> owner, PeerId peer, int attempt, RRefTable::Forks asked)
      : owner_(std::move(owner)), peer_(peer), attempt_(attempt), asked_(std::move(asked)) {}
  void succeed(wire::Payload& reply) override {
    owner_->audited(peer_, asked_, wire::from_payload<ForkAudit::Reply>(reply));
  }
  void fail(std::exception_ptr) override {
    auto endpoint = owner_->endpoint_.lock();
    const auto again = owner_->audit_again(attempt_);
    if (!endpoint || !endpoint->is_present(peer_.rank)) return owner_->audited(peer_, asked_, {});
    if (!again) return owner_->give_up_audit(peer_);
    endpoint->after(again->pause,
                    [owner = owner_, peer = peer_, next = again->attempt] { owner->audit(peer, next); });
  }

 private:
  const std::shared_ptr<References> owner_;
  const PeerId peer_;
  const int attempt_;
  const RRefTable::Forks asked_;
};

void References::on_broken(std::uint32_t rank) {
  PeerId peer;
  {
    MutexLock lock(mutex_);
    peer = table_.presence().latest(rank);
    auto [it, fresh] = audits_.emplace(peer, false);
    it->second = !fresh;  // one is under way: once more after it
    if (!fresh) return;
  }
  audit(peer, 0);
}

std::optional<References::Again> References::audit_again(int attempt) const {
  MutexLock lock(mutex_);
  if (!alone_) return Again{kReconnectDelay, 0};
  return attempt + 1 < kLastAttempts ? std::optional(Again{last_pause(attempt), attempt + 1}) : std::nullopt;
}

/// The attempts' own connections broke too: that is no reason to ask once more.
void References::give_up_audit(PeerId peer) {
  MutexLock lock(mutex_);
  audits_.erase(peer);
}

void References::audit(PeerId peer, int attempt) {
  RRefTable::Forks asked;
  bool alone = false;
  {
    MutexLock lock(mutex_);
    asked = table_.forks_at(peer);
    alone = alone_;
  }
  auto endpoint = endpoint_.lock();
  if (!endpoint || asked.empty()) return audited(peer, {}, {});
  ForkAudit question;
  for (const auto& [fork, value] : asked) question.forks.push_back(fork);
  Request request = make_request(question);
  request.deadline = endpoint->runtime().executor.deadline_in(alone ? patience(attempt) : kAuditPatience);
  endpoint->send(peer.rank, std::move(request),
                 std::make_shared<AuditCompletion>(shared_from_this(), peer, attempt, std::move(asked)));
}

void References::audited(PeerId peer, const RRefTable::Forks& asked, const std::vector<GlobalId>& lost) {
  RRefTable::Effects effects;
  bool again = false;
  {
    MutexLock lock(mutex_);
    for (const GlobalId& fork : lost) {
      if (auto it = asked.find(fork); it != asked.end()) table_.lost(it->second, fork, effects);
    }
    auto it = audits_.find(peer);
    again = it != audits_.end() && it->second;
    if (it != audits_.end()) audits_.erase(it);
  }
  apply(std::move(effects));
  if (again) on_broken(peer.rank);
}

void References::answered(const RRefMessage& message, const std::exception_ptr& refusal) {
  RRefTable::Effects effects;
  std::shared_ptr<void> user;
  {
    MutexLock lock(mutex_);
    not_in_flight(message);
    if (message.kind != RRefMessage::Kind::kForkRequest) return;
    user = table_.held().find(message.fork);
    table_.held().fork_answered(message.fork, refusal == nullptr, effects);
  }
  if (user && refusal) std::static_pointer_cast<UserReference>(user)->fail(refusal);
  if (user && !refusal) std::static_pointer_cast<UserReference>(user)->confirm();
  apply(std::move(effects));
}

std::optional<References::Again> References::send_again(const RRefMessage& message, int attempt,
                                                        ErrorKind why) const {
  if (why == ErrorKind::kCancelled) return std::nullopt;  // this worker stops
  const bool unreached = why == ErrorKind::kDisconnected;
  MutexLock lock(mutex_);
  const int next = unreached && !leaving_ ? attempt : attempt + 1;
  switch (table_.presence().of(message.to)) {
    case Presence::Standing::kGone:
      return std::nullopt;
    case Presence::Standing::kUnknown:
      return next < kLookedFor ? std::optional(Again{kReconnectDelay, next}) : std::nullopt;
    case Presence::Standing::kPresent:
      break;
  }
  if (leaving_ && next >= kLastAttempts) return std::nullopt;
  if (unreached) return Again{leaving_ ? last_pause(attempt) : kReconnectDelay, next};
  // What timed out has waited already; whatever else it is, a full queue say, may have passed by then.
  return Again{why == ErrorKind::kTimedOut ? Duration::zero() : patience(attempt), next};
}

void References::apply(RRefTable::Effects effects) {
  for (const RRefMessage& message : effects.messages) send(message, 0);
  for (const auto& [reference, why] : effects.failed) {
    auto& owner = static_cast<OwnerReference&>(*std::static_pointer_cast<Reference>(reference));
    owner.set_error(std::make_exception_ptr(refused(owner.value_id(), why)));
  }
  let_go(std::move(effects.released));
}

void References::let_go(std::vector<std::shared_ptr<void>> references) const {
  // How many hold a value says nothing: who holds it too may let go at this moment.
  std::erase_if(references, [](const std::shared_ptr<void>& kept) {
    return !kept || !std::static_pointer_cast<Reference>(kept)->is_owner();
  });
  if (references.empty()) return;
  const auto endpoint = endpoint_.lock();
  if (auto host = endpoint ? endpoint->host().lock() : nullptr)
    host->post([ended = std::move(references)] {});
}

void References::not_in_flight(const RRefMessage& message) {
  const auto it = in_flight_.find({message.to, message.kind});
  if (it != in_flight_.end() && --it->second == 0) in_flight_.erase(it);
}

/// Sends again whatever fails, for whatever reason; a peer that is gone needs no answer.
class References::ControlCompletion final : public Completion {
 public:
  ControlCompletion(std::shared_ptr<References> owner, RRefMessage message, int attempt)
      : owner_(std::move(owner)), message_(std::move(message)), attempt_(attempt) {}
  void succeed(wire::Payload& reply) override {
    std::optional<Error> refusal;
    if (message_.kind == RRefMessage::Kind::kForkRequest)
      refusal = wire::from_payload<ForkRequest::Reply>(reply);
    owner_->answered(message_, refusal ? std::make_exception_ptr(*refusal) : nullptr);
  }
  void fail(std::exception_ptr error) override {
    const ErrorKind why = to_error(error).kind();
    auto endpoint = owner_->endpoint_.lock();
    const auto again = owner_->send_again(message_, attempt_, why);
    if (!endpoint || !again) return owner_->answered(message_, error);
    endpoint->after(again->pause, [owner = owner_, message = message_, next = again->attempt] {
      owner->send(message, next);
      MutexLock lock(owner->mutex_);
      owner->not_in_flight(message);
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
    ++in_flight_[{message.to, message.kind}];
  }
  Request request = to_request(message);
  request.deadline = endpoint->runtime().executor.deadline_in(patience(attempt));
  endpoint->send(message.to.rank, std::move(request),
                 std::make_shared<ControlCompletion>(shared_from_this(), message, attempt));
}

}  // namespace torchspan::rpc
