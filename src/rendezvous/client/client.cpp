#include "rendezvous/client/client.h"

#include <algorithm>
#include <fmt/format.h>

#include "core/api/timeout_notice.h"
#include "rendezvous/store/roster.h"

namespace torchspan::rendezvous {
namespace {

constexpr Duration kFirstBackoff = std::chrono::milliseconds(20);
constexpr Duration kLongestBackoff = std::chrono::milliseconds(500);
constexpr Duration kDialTimeout = std::chrono::seconds(5);

std::string silence_of_the_store(Duration silence) {
  return silence_text(silence) + "; the other workers consider this one dead";
}

Error has_left() { return {ErrorKind::kCancelled, "this worker has left the world"}; }

}  // namespace

Client::Client(Runtime& runtime, const TransportFactory& transports, MembershipOptions options, Member self)
    : runtime_(runtime),
      options_(std::move(options)),
      self_(std::move(self)),
      began_(runtime.executor.now()),
      join_until_(runtime.executor.deadline_in(options_.timeout)),
      redial_{.pause = kFirstBackoff},
      death_log_(runtime.log, runtime.executor),
      events_(runtime),
      rounds_(
          runtime, options_.store_address, [this](const Bytes& message) { send_to_store(message); },
          [this](int rank) { return incarnation_of(rank); }),
      verdict_(runtime.executor.make_parker()),
      farewell_(runtime.executor.make_parker()),
      transport_(transports(self_.name + ".membership", *this)) {
  add_handlers();
  runner_.thread = runtime_.executor.spawn("torchspan membership", [this] {
    runner_.id.store(::gettid());
    run();
    runner_.id.store(0);
  });
}

Client::~Client() { stop(); }

void Client::stop() {
  stopping_ = true;
  transport_->wake();
  runner_.thread.join();
}

void Client::add_handlers() {
  messages_.on<Welcome>(
      [this](Welcome message) {
        store_.newer = message.versions.newest > options_.store.newest;
        on_welcome(std::move(message));
      },
      [this](ByteReader& reader) { return Welcome::decode(reader, options_.store); });
  messages_.on<Refused>([this](Refused message) {
    const Error reason(message.kind, message.text);
    if (message.passing) return lose_store(reason);  // and registers again
    decide(reason);
  });
  messages_.on<Gathered>([this](const Gathered& message) { rounds_.complete(message); });
  messages_.on<Summed>([this](Summed message) { rounds_.complete(std::move(message)); });
  messages_.on<RoundFailed>(
      [this](RoundFailed message) { rounds_.fail(message.call, Error(message.kind, message.text)); });
  messages_.on<Missing>(
      [this](Missing message) { rounds_.set_missing(message.call, known_members(message.ranks)); });
  messages_.on<Farewell>([this](Farewell) {
    {
      MutexLock lock(mutex_);
      left_ = true;
    }
    farewell_->unpark();
  });
  messages_.on<Changes>([this](const Changes& message) { note(message); });
  messages_.on<Ping>([this](Ping message) {
    const TimePoint now = runtime_.executor.now();
    patience_ = message.dead_after;
    try {
      send_to_store(encode_message(Pong{message.sent, now, runtime_.executor.now()}));
    } catch (const Error& error) {
      runtime_.log.debug(fmt::format("a heartbeat to the store could not be sent: {}", error.message()));
    }
  });
  messages_.on<DeclaredDead>([this](DeclaredDead message) {
    store_.declared_dead = true;
    lose_store(Error(ErrorKind::kTimedOut, message.reason));
  });
}

void Client::on_welcome(Welcome message) {
  std::vector<Known> departed;
  {
    MutexLock lock(mutex_);
    if (decided_) return;
    const bool named = std::any_of(message.members.begin(), message.members.end(),
                                   [&](const Member& member) { return member.name == self_.name; });
    if (!named) throw_invalid("the store's welcome is not for this worker");
    for (Member& member : message.members) {
      const int rank = member.rank;
      known_[rank] = {std::move(member)};
    }
    for (const Departed& ended : message.departed) {
      for (const int rank : ended.ranks) {
        const auto found = known_.find(rank);
        if (found == known_.end()) continue;
        Known& known = found->second;
        known.presence = ended.died ? Presence::kDied : Presence::kLeft;
        if (ended.died) {
          known.death = std::make_shared<Error>(ErrorKind::kDisconnected, describe(known.member) + ended.how);
        }
        departed.push_back(known);
      }
    }
    decided_ = true;
  }
  for (const Known& one : departed) events_.add(one.member, one.presence, one.death);
  verdict_->unpark();
}

void Client::note(const Changes& changes) {
  for (const Changes::Change& change : changes.list) {
    if (const auto* arrived = std::get_if<Arrived>(&change)) {
      for (const Member& member : arrived->members) note_arrival(member);
      continue;
    }
    const auto& departed = std::get<Departed>(change);
    std::vector<std::pair<int, std::shared_ptr<const Error>>> ended;
    std::vector<std::string> deaths;
    const TimePoint now = runtime_.executor.now();
    const std::string before = death_log_.first().before(now);  // those of one Departed died together
    for (const int rank : departed.ranks) {
      const auto known = find(rank);
      if (!known || known->presence != Presence::kPresent) continue;
      ended.emplace_back(rank, nullptr);
      if (!departed.died) continue;
      death_log_.first().add(known->member, now);
      deaths.push_back(describe(known->member) + departed.how + before);
      ended.back().second = std::make_shared<Error>(ErrorKind::kDisconnected, deaths.back());
    }
    death_log_.write(deaths, departed.how);
    for (auto& [rank, death] : ended) note_end(rank, std::move(death));
  }
}

void Client::run() {
  connect();
  while (!stopping_) {
    while (!stopping_ && transport_->poll()) {
    }
    if (silent_at_.passed(runtime_.executor.now())) on_silence();
    events_.deliver();
    if (redial_.at.passed(runtime_.executor.now())) connect();
    transport_->wait(earlier(redial_.at, silent_at_));
  }
}

void Client::connect() {
  redial_.at = Deadline::never();
  store_ = {};
  // The store may have admitted the registration of a connection that broke, and announced the end of its instance.
  if (options_.instance == 0) self_.instance = random_instance();
  Register message;
  message.versions = options_.store;
  message.job = options_.job;
  message.member = self_;
  message.world_size = options_.world_size;
  message.require_same_functions = options_.require_same_functions;
  message.functions = options_.functions;
  message.timeout = join_until_.left(runtime_.executor.now());
  try {
    const Deadline until = earlier(join_until_, runtime_.executor.deadline_in(kDialTimeout));
    auto channel = transport_->connect(options_.store_address, until);
    {
      MutexLock lock(mutex_);
      channel_ = channel;
    }
    channel->send(encode_message(message), {});
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDisconnected) return;  // on_closed() reports it
    decide(Error(error.kind(), fmt::format("the store at {} cannot be reached from here: {}",
                                           options_.store_address, error.message())));
  }
}

void Client::decide(std::optional<Error> refusal) {
  {
    MutexLock lock(mutex_);
    if (decided_) return;
    decided_ = true;
    refusal_ = std::move(refusal);
    if (refusal_ && channel_) channel_->close();
  }
  verdict_->unpark();
}

Member Client::join() {
  const TimePoint began = runtime_.executor.now();
  WaitWarnings warnings;
  while (true) {
    Deadline until = join_until_;
    {
      MutexLock lock(mutex_);
      if (decided_) {
        if (refusal_) throw Error(*refusal_).with_elapsed(runtime_.executor.now() - began_);
        return std::find_if(known_.begin(), known_.end(),
                            [&](const auto& one) { return one.second.member.name == self_.name; })
            ->second.member;
      }
      if (channel_) until = with_grace(until);
      if (until.passed(runtime_.executor.now())) break;
    }
    verdict_->park(earlier(until, Deadline(began + warnings.next())));
    if (!warnings.due(runtime_.executor.now() - began)) continue;
    MutexLock lock(mutex_);
    // A worker that is connected waits for others, which rank 0 names.
    if (decided_ || !last_failure_ || runtime_.executor.now() - last_failure_->at > 2 * kDialTimeout)
      continue;
    runtime_.log.warning(fmt::format("this worker has waited {:.0f} s for rank 0 at {}: {}",
                                     to_seconds(runtime_.executor.now() - began_), options_.store_address,
                                     last_failure_->error.message()));
  }
  throw unreachable().with_elapsed(runtime_.executor.now() - began_);
}

Error Client::unreachable() const {
  const double seconds = to_seconds(options_.timeout);
  MutexLock lock(mutex_);
  // When rank 0 has given up, it refuses connections, which says less than what failed before.
  const std::string before = !channel_ && last_failure_ && last_failure_->before
                                 ? fmt::format("; before that: {}", last_failure_->before->message())
                                 : std::string();
  return Error(
      ErrorKind::kTimedOut,
      fmt::format("rank 0 at {} did not answer within {:g} s ({}{}); is it running, and do MASTER_ADDR and "
                  "MASTER_PORT name its address?",
                  options_.store_address, seconds,
                  channel_        ? "its store accepted the connection, but did not answer"
                  : last_failure_ ? last_failure_->error.message()
                                  : "no answer at all",
                  before));
}

void Client::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  {
    MutexLock lock(mutex_);
    if (channel_ != channel) return;
  }
  try {
    const bool large = message.segments.size() == 1;
    messages_.dispatch(
        large ? BytesView(message.segments[0].data, message.segments[0].size) : BytesView(message.header),
        store_.newer ? Sender::kNewer : Sender::kKnown);
    if (patience_) silent_at_ = runtime_.executor.deadline_in(*patience_);
  } catch (const Error& error) {
    runtime_.log.error(fmt::format("the store at {} sent bytes that are not a message: {}", channel->peer(),
                                   error.message()));
    channel->close();
  }
}

void Client::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  {
    MutexLock lock(mutex_);
    if (channel_ != channel) return;
  }
  lose_store(reason);
}

void Client::on_silence() {
  lose_store(Error(ErrorKind::kTimedOut, silence_of_the_store(*patience_)), /*silent=*/true);
}

void Client::lose_store(const Error& reason, bool silent) {
  patience_.reset();
  silent_at_ = Deadline::never();
  bool decided, leaving;
  {
    MutexLock lock(mutex_);
    if (channel_) channel_->close();
    channel_.reset();
    decided = decided_;
    leaving = leaving_;
    left_ = left_ || leaving;
  }
  if (!decided) {
    on_closed_before_welcome(reason);
  } else if (leaving) {
    farewell_->unpark();
  } else {
    // A connection that was silent before its end ended because of the silence.
    on_store_gone(reason, silent || store_.declared_dead || reason.elapsed() > Duration::zero());
  }
}

void Client::end_part(const Error& reason) {
  std::optional<Error> later;
  {
    MutexLock lock(mutex_);
    if (!store_gone_) store_gone_ = reason;
    later = leaving_ ? has_left() : *store_gone_;
  }
  rounds_.cancel(reason, *later);
  events_.clear();
}

void Client::on_closed_before_welcome(const Error& reason) {
  const std::string& address = options_.store_address;
  switch (reason.kind()) {
    case ErrorKind::kDenied:
      decide(Error(
          ErrorKind::kDenied,
          fmt::format("the store at {} and this worker do not accept each other: {}; all workers of a job "
                      "need the same TORCHSPAN_SECRET_FILE and TORCHSPAN_NETWORK, and if another job is "
                      "serving there, choose another MASTER_PORT",
                      address, reason.message())));
      return;
    case ErrorKind::kInvalid:
    case ErrorKind::kUnsupported:
      decide(Error(reason.kind(),
                   fmt::format("what answers at {} is not the store of a TorchSpan job: {}; choose another "
                               "MASTER_PORT",
                               address, reason.message())));
      return;
    default:
      break;
  }
  {
    MutexLock lock(mutex_);
    std::optional<Error> before;
    if (last_failure_)
      before = last_failure_->error.kind() != reason.kind() ? last_failure_->error : last_failure_->before;
    last_failure_ = {reason, runtime_.executor.now(), std::move(before)};
  }
  redial_.at = runtime_.executor.deadline_in(redial_.pause);
  redial_.pause = std::min(redial_.pause * 2, kLongestBackoff);
}

void Client::on_store_gone(const Error& reason, bool held_for_dead) {
  const std::string cause =
      store_.declared_dead
          ? fmt::format(
                "its store declared this worker dead, which was {}; restart this worker to join "
                "again",
                reason.message())
      : reason.elapsed() > Duration::zero() ? silence_of_the_store(reason.elapsed())
      : reason.kind() == ErrorKind::kDisconnected
          ? "its process ended, or the connection to it broke; see its own output for why"
          : reason.message();
  std::optional<Error> departed;
  {
    MutexLock lock(mutex_);
    const auto found = known_.find(0);
    if (found == known_.end()) return;  // this worker was refused, so it was never a member
    const bool rank0_left = found->second.presence == Presence::kLeft;
    const std::string server = describe(found->second.member);
    if (found->second.death) departed = *found->second.death;
    if (!departed)
      departed.emplace(ErrorKind::kDisconnected,
                       store_.declared_dead
                           ? fmt::format("{} no longer serves this worker: {}", server, cause)
                       : rank0_left ? fmt::format("the store closed, since {} left the world", server)
                                    : fmt::format("{} died, and the store with it: {}{}", server, cause,
                                                  death_log_.first().before(runtime_.executor.now())));
    store_gone_ = departed;
  }
  rounds_.cancel(*departed, *departed);
  if (options_.rank == 0) return;
  if (const auto rank0 = find(0); rank0 && rank0->presence == Presence::kPresent) {
    // That this worker itself was declared dead is not a consequence of another death.
    if (held_for_dead) {
      runtime_.log.warning(departed->message());
    } else {
      death_log_.write({departed->message()}, "");
    }
  }
  note_end(0, std::make_shared<Error>(*departed));
  if (held_for_dead) note_own_death(*departed);
}

std::optional<Client::Known> Client::find(int rank) const {
  MutexLock lock(mutex_);
  const auto found = known_.find(rank);
  return found == known_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<Member> Client::members() const {
  MutexLock lock(mutex_);
  std::vector<Member> members;
  for (const auto& [rank, known] : known_) members.push_back(known.member);
  return members;
}

std::vector<Member> Client::known_members(const std::vector<int>& ranks) const {
  std::vector<Member> members;
  MutexLock lock(mutex_);
  for (const int rank : ranks) {
    if (const auto known = known_.find(rank); known != known_.end()) members.push_back(known->second.member);
  }
  return members;
}

std::uint32_t Client::incarnation_of(int rank) const {
  MutexLock lock(mutex_);
  const auto found = known_.find(rank);
  return found == known_.end() ? 0 : found->second.member.incarnation;
}

Contribute Client::contribution(const std::string& tag, BytesView mine, const std::vector<int>& ranks,
                                Deadline deadline) const {
  Contribute message;
  message.tag = tag;
  message.ranks = ranks;
  message.timeout = deadline.left(runtime_.executor.now());
  message.bytes.assign(mine.begin(), mine.end());
  return message;
}

void Client::send_to_store(const Bytes& message) {
  std::shared_ptr<net::Channel> channel;
  {
    MutexLock lock(mutex_);
    channel = channel_;
  }
  if (channel) channel->send(message, {});
}

std::vector<int> Client::ranks() const {
  MutexLock lock(mutex_);
  std::vector<int> ranks;
  for (const auto& [rank, known] : known_) ranks.push_back(rank);
  return ranks;
}

std::optional<Member> Client::find_named(std::string_view name) const {
  MutexLock lock(mutex_);
  const auto found = std::find_if(known_.begin(), known_.end(),
                                  [&](const auto& one) { return one.second.member.name == name; });
  return found == known_.end() ? std::nullopt : std::optional(found->second.member);
}

void Client::end_with(const Bytes& last_lines, const Error& for_waiters, Deadline deadline) {
  std::shared_ptr<net::Channel> channel;
  {
    MutexLock lock(mutex_);
    if (leaving_) return;
    leaving_ = true;
    channel = channel_;
    left_ = channel == nullptr;
  }
  rounds_.cancel(for_waiters, has_left());
  events_.clear();
  try {
    if (channel) channel->send(last_lines, {});
  } catch (const Error&) {
    // The store has ended, so it gets no goodbye; on_closed() ends the wait below.
  }
  if (is_callback_thread()) return;
  while (true) {
    {
      MutexLock lock(mutex_);
      if (left_) break;
    }
    if (!farewell_->park(deadline)) break;
  }
  if (channel) channel->close();
  stop();
}

void Client::leave(Deadline deadline) {
  end_with(encode_message(Leave{}), Error(ErrorKind::kCancelled, "this worker is leaving the world"),
           deadline);
}

void Client::give_up(const std::string& why, Deadline deadline) {
  end_with(encode_message(GiveUp{why}), Error(ErrorKind::kCancelled, "this worker was stopped"), deadline);
}

void Client::note_end(int rank, std::shared_ptr<const Error> death) {
  Known ended;
  {
    MutexLock lock(mutex_);
    const auto found = known_.find(rank);
    if (found == known_.end() || found->second.presence != Presence::kPresent) return;
    Known& known = found->second;
    known.presence = death ? Presence::kDied : Presence::kLeft;
    known.death = std::move(death);
    ended = known;
  }
  events_.add(ended.member, ended.presence, std::move(ended.death));
  events_.deliver();
}

void Client::note_own_death(const Error& reason) {
  Member member;
  {
    MutexLock lock(mutex_);
    const auto self = std::find_if(known_.begin(), known_.end(), [&](const auto& one) {
      return one.second.member.instance == self_.instance;
    });
    if (self == known_.end()) return;
    member = self->second.member;
  }
  events_.add(member, Presence::kDied, std::make_shared<Error>(reason));
  events_.deliver();
}

void Client::note_arrival(const Member& member) {
  {
    MutexLock lock(mutex_);
    known_[member.rank] = {member};
  }
  rounds_.replaced();
  events_.add(member, Presence::kPresent, nullptr);
  events_.deliver();
}

void Client::watch(Membership::Callbacks callbacks) {
  events_.watch(std::move(callbacks));
  transport_->wake();
}

}  // namespace torchspan::rendezvous
