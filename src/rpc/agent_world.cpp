#include <algorithm>
#include <fmt/format.h>

#include "rpc/agent.h"

namespace torchspan::rpc {
namespace {

/// How long a peer may talk before the store told us that it joined, and how much.
constexpr Duration kParkingLimit = std::chrono::seconds(5);
constexpr std::uint64_t kParkingBytes = std::uint64_t{64} << 20;
constexpr Duration kStoppedCheck = std::chrono::seconds(1);

LinkMember link_member(const rendezvous::Member& member) {
  return {{member.name, static_cast<std::uint32_t>(member.rank)},
          member.address,
          member.instance,
          member.incarnation};
}

}  // namespace

void RpcAgent::start(std::unique_ptr<rendezvous::Membership> membership) {
  membership_ = std::move(membership);
  const rendezvous::Member& self = membership_->self();
  self_ = {self.name, static_cast<std::uint32_t>(self.rank)};
  instance_ = self.instance;
  incarnation_ = self.incarnation;
  open_world_ = membership_->open();
  references_->begin({self_.rank, self.incarnation});
  roster_.clear();
  roster_.set(self_);
  if (!transport_) {
    timer_ = runtime_.executor.make_parker();
    leader_ = runtime_.executor.spawn(self_.name + "/timer", [this] { watch_deadlines(); });
    return;
  }
  links_ = std::make_unique<Links>(*transport_, runtime_.executor, link_member(self));
  for (const rendezvous::Member& member : membership_->members()) {
    if (member.rank == self.rank) continue;
    references_->joined(link_member(member).id());
    links_->add(link_member(member));
    roster_.set({member.name, static_cast<std::uint32_t>(member.rank)});
  }
  if (!open_world_) devices_.check_names(roster_.all());
  leader_ = runtime_.executor.spawn(self_.name + "/net", [this] { lead(); });
  membership_->watch(
      {.joined = [this](const rendezvous::Member& member) { member_joined(member); },
       .died = [this](const rendezvous::Member& member,
                      const Error& reason) { member_departed(link_member(member), reason); },
       .left =
           [this](const rendezvous::Member& member) {
             member_departed(
                 link_member(member),
                 Error(ErrorKind::kDisconnected, fmt::format("worker '{}' has left the world", member.name)));
           }});
}

void RpcAgent::member_joined(const rendezvous::Member& member) {
  const LinkMember link = link_member(member);
  if (link.info.rank == self_.rank || links_->knows(link)) return;
  references_->joined(link.id());
  links_->add(link);
  roster_.set(link.info);
  if (runtime_.log.enabled(LogLevel::kDebug))
    runtime_.log.debug(fmt::format("worker '{}' (rank {}) joined the world", member.name, member.rank));
  timers_.at(Deadline(runtime_.executor.now()), [this] { admit_parked(); });
  wake_leader();
}

void RpcAgent::member_departed(const LinkMember& member, const Error& reason) {
  const std::uint32_t rank = member.info.rank;
  if (rank == self_.rank || !links_->departed(member, reason)) return;
  if (runtime_.log.enabled(LogLevel::kDebug)) {
    runtime_.log.debug(
        fmt::format("worker '{}' (rank {}) is gone: {}", member.info.name, rank, reason.message()));
  }
  fail_calls(calls_.take_peer(rank), reason);
  for (const IncomingPtr& call : serving_.all()) {
    if (call->peer == rank) call->request_stop();
  }
  references_->departed(member.id());
  for (const auto& callback : departure_callbacks_) callback(rank, reason);
  if (open_world_) roster_.remove(rank);
}

bool RpcAgent::is_present(std::uint32_t rank) const {
  return rank == self_.rank || (links_ && links_->is_present(rank));
}

void RpcAgent::receive_hello(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  for (Parked& parked : parked_) {
    if (parked.channel != channel) continue;
    parked.bytes += message.header.size();
    for (const Buffer& segment : message.segments) parked.bytes += segment.size;
    if (parked.bytes > kParkingBytes)
      throw Error(ErrorKind::kOverloaded, "the peer sends too much before anybody told us that it joined");
    return parked.messages.push_back(std::move(message));
  }
  const wire::FrameView frame = wire::decode_frame(message.header);
  if (frame.header.type != Hello::kType) {
    throw Error(ErrorKind::kInvalid, "the peer's first message is not a hello");
  }
  wire::Payload payload;
  payload.value.assign(frame.value.begin(), frame.value.end());
  const auto hello = wire::from_payload<Hello>(payload);
  if (links_->greet(channel, hello)) {
    if (runtime_.log.enabled(LogLevel::kDebug))
      runtime_.log.debug(fmt::format("worker '{}' (rank {}) connected", hello.name, hello.rank));
    return;
  }
  // Perhaps it joined a moment ago, and the news is on its way.
  const Deadline until = runtime_.executor.deadline_in(kParkingLimit);
  parked_.push_back({channel, hello, until, {}, 0});
  timers_.at(until, [this] { admit_parked(); });
}

/// Dispatches what parked peers sent, if they are known by now, and turns away those that waited too long.
void RpcAgent::admit_parked() {
  DriverLockGuard hold(driver_lock_, runtime_.executor);
  const TimePoint now = runtime_.executor.now();
  std::vector<Parked> still, admitted;
  for (Parked& parked : std::exchange(parked_, {})) {
    if (links_->greet(parked.channel, parked.hello)) {
      admitted.push_back(std::move(parked));
    } else if (!parked.until.passed(now)) {
      still.push_back(std::move(parked));
    } else {
      protocol_error(
          parked.channel,
          Error(ErrorKind::kDenied,
                fmt::format("a peer calls itself '{}' (rank {}, instance {:x}), which is no member of this "
                            "world; a worker of an earlier run may still be alive",
                            parked.hello.name, parked.hello.rank, parked.hello.instance)));
    }
  }
  parked_ = std::move(still);
  for (Parked& parked : admitted) {
    for (net::Message& message : parked.messages) on_message(parked.channel, std::move(message));
  }
}

/// A stopped or debugged process keeps its connections: its calls would wait for as long as it sleeps.
void RpcAgent::watch_stopped_peers() {
  if (options_.stopped_limit == Duration::zero() || !links_ || watching_stopped_.exchange(true)) return;
  const Deadline when = runtime_.executor.deadline_in(kStoppedCheck);
  if (timers_.at(when, [this] { check_stopped_peers(); }).earliest) wake_leader_by(when);
}

void RpcAgent::check_stopped_peers() {
  const TimePoint now = runtime_.executor.now();
  std::map<std::uint32_t, TimePoint> stopped;
  for (const std::uint32_t peer : calls_.peers()) {
    if (peer == self_.rank ||
        membership_->condition(static_cast<int>(peer)) != rendezvous::Condition::kStopped)
      continue;
    const auto before = stopped_since_.find(peer);
    stopped[peer] = before == stopped_since_.end() ? now : before->second;
    if (now - stopped[peer] < options_.stopped_limit) continue;
    fail_calls(
        calls_.take_peer_older(peer, now - options_.stopped_limit),
        Error(
            ErrorKind::kDisconnected,
            fmt::format(
                "worker '{}' (rank {}) is stopped, by a signal or a debugger, for {:.0f} s so far; continue "
                "it "
                "(kill -CONT) and call again, or allow more than {:g} s with TORCHSPAN_STOPPED_LIMIT (0: any "
                "time)",
                roster_.name(peer), peer, to_seconds(now - stopped[peer]),
                to_seconds(options_.stopped_limit))));
  }
  stopped_since_ = std::move(stopped);
  watching_stopped_.store(false);
  if (calls_.size() != 0) watch_stopped_peers();
}

std::map<std::string, Bytes> RpcAgent::all_gather_bytes(const std::string& tag, const Bytes& mine,
                                                        const std::vector<std::string>& participants,
                                                        Deadline deadline) {
  std::shared_ptr<rendezvous::Membership> membership;
  {
    MutexLock lock(membership_mutex_);
    membership = membership_;
  }
  if (is_stopping() || !membership) throw shut_down();
  std::map<int, std::string> who;
  for (const std::string& name : participants) who.emplace(static_cast<int>(resolve(name)), name);
  if (who.empty() && membership->open()) {
    throw Error(ErrorKind::kInvalid, "an open world has no fixed set of workers: name the participants");
  }
  if (who.empty()) {
    for (const WorkerInfo& worker : roster_.all()) who.emplace(static_cast<int>(worker.rank), worker.name);
  }
  // Only members wait for each other; the tag tells groups apart, so that their rounds are counted one by
  // one.
  std::string group = tag;
  std::vector<int> ranks;
  for (const auto& [rank, name] : who) {
    group += fmt::format(".{}", rank);
    ranks.push_back(rank);
  }
  const std::vector<Bytes> gathered = membership->all_gather_bytes(group, mine, ranks, deadline);
  std::map<std::string, Bytes> result;
  for (std::size_t i = 0; i < ranks.size(); ++i) result[who.at(ranks[i])] = gathered[i];
  return result;
}

}  // namespace torchspan::rpc
