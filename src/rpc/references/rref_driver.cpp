#include "rpc/references/rref_driver.h"

#include <algorithm>
#include <fmt/format.h>

#include "rpc/references/control.h"
#include "rpc/references/reference_states.h"

namespace torchspan::rpc {
namespace {

/// How many attempts at a message fail or stay unanswered before a worker that shuts down gives it up.
constexpr int kLastAttempts = 6;
/// How many attempts a message to a worker whose join is unknown gets.
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

/// Returns how long the given attempt waits for its answer.
Duration patience(int attempt) {
  Duration limit = kFirstAttempt;
  for (int i = 0; i < attempt && limit < kLongestAttempt; ++i) limit = limit * 3 / 2;
  return std::min(limit, kLongestAttempt);
}

/// Returns the pause before a worker that leaves tries again to reach a peer. In all, a peer that refuses
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

std::optional<Error> RRefDriver::receive(const RRefMessage& message, PeerId from) {
  std::optional<Refusal> refusal;
  change([&](RRefTable& table, RRefTable::Effects& effects) {
    RRefMessage here = message;
    if (here.kind != RRefMessage::Kind::kForkRequest) here.to = table.self();
    here.to.rank = table.self().rank;
    refusal = table.receive(here, from, effects);
  });
  if (!refusal) return std::nullopt;
  return refused(message.value, *refusal);
}

std::vector<GlobalId> RRefDriver::on_fork_audit(const std::vector<GlobalId>& forks, PeerId from) {
  MutexLock lock(shared_->mutex);
  return shared_->table.held().missing(forks, from);
}

/// Completes an audit; asks again if this connection breaks, too.
class RRefDriver::AuditCompletion final : public Completion {
 public:
  AuditCompletion(std::shared_ptr<RRefDriver> owner, PeerId peer, int attempt, RRefTable::Forks asked)
      : owner_(std::move(owner)), peer_(peer), attempt_(attempt), asked_(std::move(asked)) {}
  void succeed(wire::Payload& reply) override {
    owner_->audited(peer_, asked_, wire::from_payload<ForkAudit::Reply>(reply));
  }
  void fail(std::exception_ptr) override {
    auto backend = owner_->backend_.lock();
    const auto again = owner_->audit_again(attempt_);
    if (!backend || !backend->is_present(peer_.rank)) return owner_->audited(peer_, asked_, {});
    if (!again) return owner_->give_up_audit(peer_);
    backend->after(again->pause,
                   [owner = owner_, peer = peer_, next = again->attempt] { owner->audit(peer, next); });
  }

 private:
  const std::shared_ptr<RRefDriver> owner_;
  const PeerId peer_;
  const int attempt_;
  const RRefTable::Forks asked_;
};

PeerId RRefDriver::latest(std::uint32_t rank) const {
  MutexLock lock(shared_->mutex);
  return shared_->table.presence().latest(rank);
}

void RRefDriver::on_broken(std::uint32_t rank) {
  const PeerId peer = latest(rank);
  {
    MutexLock lock(mutex_);
    auto [it, fresh] = audits_.emplace(peer, false);
    it->second = !fresh;  // one is in progress: repeat it
    if (!fresh) return;
  }
  audit(peer, 0);
}

std::optional<RRefDriver::Again> RRefDriver::audit_again(int attempt) const {
  MutexLock lock(mutex_);
  if (!alone_) return Again{kReconnectDelay, 0};
  return attempt + 1 < kLastAttempts ? std::optional(Again{last_pause(attempt), attempt + 1}) : std::nullopt;
}

/// Ends an audit. The connections of its attempts broke, too; that is no reason to ask once more.
void RRefDriver::give_up_audit(PeerId peer) {
  MutexLock lock(mutex_);
  audits_.erase(peer);
}

void RRefDriver::audit(PeerId peer, int attempt) {
  RRefTable::Forks asked;
  bool alone = false;
  {
    MutexLock lock(shared_->mutex);
    asked = shared_->table.forks_at(peer);
  }
  {
    MutexLock lock(mutex_);
    alone = alone_;
  }
  auto backend = backend_.lock();
  if (!backend || asked.empty()) return audited(peer, {}, {});
  ForkAudit question;
  for (const auto& [fork, value] : asked) question.forks.push_back(fork);
  Request request = make_request(question);
  request.deadline = backend->runtime().executor.deadline_in(alone ? patience(attempt) : kAuditPatience);
  backend->send(peer.rank, std::move(request),
                std::make_shared<AuditCompletion>(shared_from_this(), peer, attempt, std::move(asked)));
}

void RRefDriver::audited(PeerId peer, const RRefTable::Forks& asked, const std::vector<GlobalId>& lost) {
  change([&](RRefTable& table, RRefTable::Effects& effects) {
    for (const GlobalId& fork : lost) {
      if (auto it = asked.find(fork); it != asked.end()) table.lost(it->second, fork, effects);
    }
  });  // its messages are sent before the audit ends: idle() must see them
  bool again = false;
  {
    MutexLock lock(mutex_);
    auto it = audits_.find(peer);
    again = it != audits_.end() && it->second;
    if (it != audits_.end()) audits_.erase(it);
  }
  if (again) on_broken(peer.rank);
}

void RRefDriver::answered(const RRefMessage& message, const std::exception_ptr& refusal) {
  if (message.kind != RRefMessage::Kind::kForkRequest) return not_in_flight(message);
  std::shared_ptr<void> user;
  change([&](RRefTable& table, RRefTable::Effects& effects) {
    user = table.held().find(message.fork);
    table.held().fork_answered(message.fork, refusal == nullptr, effects);
  });
  if (user && refusal) std::static_pointer_cast<UserReference>(user)->fail(refusal);
  if (user && !refusal) std::static_pointer_cast<UserReference>(user)->confirm();
  not_in_flight(message);  // last: idle() must see the messages that the answer caused
}

std::optional<RRefDriver::Again> RRefDriver::send_again(const RRefMessage& message, int attempt,
                                                        ErrorKind why) const {
  if (why == ErrorKind::kCancelled) return std::nullopt;  // this worker stops
  bool leaving = false;
  {
    MutexLock lock(mutex_);
    leaving = leaving_;
  }
  Presence::Standing standing;
  {
    MutexLock lock(shared_->mutex);
    standing = shared_->table.presence().of(message.to);
  }
  const bool unreached = why == ErrorKind::kDisconnected;
  const int next = unreached && !leaving ? attempt : attempt + 1;
  if (standing == Presence::Standing::kDeparted) return std::nullopt;
  if (standing == Presence::Standing::kUnknown)
    return next < kLookedFor ? std::optional(Again{kReconnectDelay, next}) : std::nullopt;
  if (leaving && next >= kLastAttempts) return std::nullopt;
  if (unreached) return Again{leaving ? last_pause(attempt) : kReconnectDelay, next};
  // A message that timed out has waited already; another cause, such as a full queue, may pass meanwhile.
  return Again{why == ErrorKind::kTimedOut ? Duration::zero() : patience(attempt), next};
}

void RRefDriver::apply(RRefTable::Effects effects) {
  for (const RRefMessage& message : effects.messages) send(message, 0);
  for (const auto& [reference, why] : effects.failed) {
    auto& owner = static_cast<OwnerReference&>(*std::static_pointer_cast<Reference>(reference));
    owner.set_error(std::make_exception_ptr(refused(owner.value_id(), why)));
  }
  release_references(std::move(effects.released));
}

void RRefDriver::release_references(std::vector<std::shared_ptr<void>> references) const {
  // The use count does not matter: another holder may release the value at the same moment.
  std::erase_if(references, [](const std::shared_ptr<void>& kept) {
    return !kept || !std::static_pointer_cast<Reference>(kept)->is_owner();
  });
  if (references.empty()) return;
  const auto backend = backend_.lock();
  if (auto continuations = backend ? backend->continuations().lock() : nullptr)
    continuations->post([ended = std::move(references)] {});
}

void RRefDriver::not_in_flight(const RRefMessage& message) {
  MutexLock lock(mutex_);
  const auto it = in_flight_.find({message.to, message.kind});
  if (it != in_flight_.end() && --it->second == 0) in_flight_.erase(it);
}

/// Completes a control message: sends it again after any failure. A peer that is gone need not answer.
class RRefDriver::ControlCompletion final : public Completion {
 public:
  ControlCompletion(std::shared_ptr<RRefDriver> owner, RRefMessage message, int attempt)
      : owner_(std::move(owner)), message_(std::move(message)), attempt_(attempt) {}
  void succeed(wire::Payload& reply) override {
    std::optional<Error> refusal;
    if (message_.kind == RRefMessage::Kind::kForkRequest)
      refusal = wire::from_payload<ForkRequest::Reply>(reply);
    owner_->answered(message_, refusal ? std::make_exception_ptr(*refusal) : nullptr);
  }
  void fail(std::exception_ptr error) override {
    const ErrorKind why = to_error(error).kind();
    auto backend = owner_->backend_.lock();
    const auto again = owner_->send_again(message_, attempt_, why);
    if (!backend || !again) return owner_->answered(message_, error);
    backend->after(again->pause, [owner = owner_, message = message_, next = again->attempt] {
      owner->send(message, next);
      owner->not_in_flight(message);
    });
  }

 private:
  std::shared_ptr<RRefDriver> owner_;
  const RRefMessage message_;
  const int attempt_;
};

void RRefDriver::send(const RRefMessage& message, int attempt) {
  auto backend = backend_.lock();
  if (!backend) return;
  {
    MutexLock lock(mutex_);
    ++in_flight_[{message.to, message.kind}];
  }
  Request request = to_request(message);
  request.deadline = backend->runtime().executor.deadline_in(patience(attempt));
  backend->send(message.to.rank, std::move(request),
                std::make_shared<ControlCompletion>(shared_from_this(), message, attempt));
}

Error RRefDriver::refused(GlobalId value, const Refusal& refusal) const {
  auto backend = backend_.lock();
  const std::uint32_t rank = refusal.who.rank;
  const PeerId latest = this->latest(rank);
  // Another process may have the rank by now, in an open world under another name.
  const std::string who = latest != refusal.who && latest.incarnation > 0
                              ? fmt::format("an earlier process of rank {}", rank)
                          : backend ? fmt::format("worker '{}'", backend->name_of(rank))
                                    : fmt::format("rank {}", rank);
  const std::string what = fmt::format("value {}:{} is not available: ", value.worker, value.local);
  const auto gone = [&](const std::string& why) { return Error(ErrorKind::kDisconnected, what + why); };
  switch (refusal.why) {
    case Refusal::Why::kHolderDeparted:
      return gone(who +
                  ", through which it was shared, died or left before its owner knew of this "
                  "reference; make the value again");
    case Refusal::Why::kCreatorDeparted:
      return gone(who + ", which created it, died or left, and no other reference was known to its owner");
    case Refusal::Why::kGivenUp:
      return Error(ErrorKind::kCancelled, fmt::format("{}{}, which created it, cancelled the creation: {}",
                                                      what, who, refusal.text));
    case Refusal::Why::kOtherOwner:
      return gone("it belonged to an earlier process of its owner, which ended");
    case Refusal::Why::kOwnerDeparted:
      return gone(who + ", its owner, died or left, and the value with it");
    case Refusal::Why::kSenderDeparted:
      return gone(who + ", which sent this reference, died or left before its owner knew of it");
    case Refusal::Why::kSentTwice:
      return Error(ErrorKind::kInvalid,
                   fmt::format("{} sent the number of a reference that this worker has already", who));
    case Refusal::Why::kReleased:
      break;
  }
  return gone(
      "its owner destroyed the value before it learned of this reference: every reference that it knew of "
      "was "
      "released");
}

void RRefDriver::leave(bool alone) {
  MutexLock lock(mutex_);
  leaving_ = true;
  alone_ = alone;
}

bool RRefDriver::idle() const {
  MutexLock lock(mutex_);
  return in_flight_.empty() && audits_.empty();
}

std::vector<std::string> RRefDriver::outstanding() const {
  std::map<std::pair<std::uint32_t, std::string_view>, std::size_t> counts;
  {
    MutexLock lock(mutex_);
    for (const auto& [message, count] : in_flight_)
      counts[{message.first.rank, name_of(message.second)}] += count;
    for (const auto& [peer, again] : audits_) ++counts[{peer.rank, ForkAudit::kName}];
  }
  const auto backend = backend_.lock();
  std::vector<std::string> lines;
  for (const auto& [message, count] : counts) {
    const auto& [rank, name] = message;
    lines.push_back(fmt::format(
        "no answer to {} of '{}' to {}", count, name,
        backend ? fmt::format("worker '{}'", backend->name_of(rank)) : fmt::format("rank {}", rank)));
  }
  return lines;
}

}  // namespace torchspan::rpc
