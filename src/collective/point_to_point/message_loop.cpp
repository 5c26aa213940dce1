#include "collective/point_to_point/message_loop.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>

#include <torchspan/detail/core/runtime.h>

#include "collective/tensors.h"
#include "core/api/span_kinds.h"
#include "core/api/step_part.h"
#include "core/api/throw_invalid.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective {
using channels::GroupMessage;
using channels::LinkEnd;

namespace {

channels::LinksPlan links_plan(const PairPlan& plan) {
  const std::uint64_t nonce = channels::GroupLinks::make_nonce(*plan.world, plan.group);
  return {.name = fmt::format("messages.{:x}", nonce),
          .ranks = plan.members.size(),
          .rank = plan.rank,
          .nonce = nonce};
}

}  // namespace

PairConnections::PairConnections(PairPlan plan, MessageLoop& loop)
    : plan_(std::move(plan)),
      loop_(loop),
      executor_(plan_.world->runtime()->executor),
      peers_(plan_.members.ranks.size()),
      links_(*plan_.world, links_plan(plan_), *this) {
  MutexLock lock(requests_->mutex);
  requests_->links = &links_;
}

PairConnections::~PairConnections() { stop(std::nullopt); }

void PairConnections::stop(const std::optional<channels::Abort>& cause) {
  {
    MutexLock lock(requests_->mutex);
    requests_->links = nullptr;
  }
  links_.stop("has destroyed its group", cause);
}

Deadline PairConnections::poll() {
  connect_pending();
  return loop_.poll();
}

void PairConnections::open(int rank) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(peers_[static_cast<std::size_t>(rank)].opened, true)) return;
  }
  const int self = plan_.members.ranks[static_cast<std::size_t>(plan_.rank)];
  const int other = plan_.members.ranks[static_cast<std::size_t>(rank)];
  ByteWriter mine;
  mine.put(links_.nonce());
  mine.put_string(links_.address());
  const auto done = [requests = requests_, rank](std::vector<Bytes> both, std::optional<Error> failure) {
    MutexLock lock(requests->mutex);
    if (requests->links == nullptr) return;
    requests->pending.push_back({rank, std::move(both), std::move(failure)});
    requests->links->wake();
  };
  try {
    plan_.world->ask([&](rendezvous::Membership& world) {
      // Operations have deadlines; another rank may ask for the connection at any time.
      world.all_gather_bytes_once(fmt::format("torchspan.messages.{:x}", plan_.group), mine.bytes(),
                                  {self, other}, done);
    });
  } catch (const Error& error) {
    departed(rank, error);
  }
}

void PairConnections::connect_pending() {
  std::vector<MutualRequest> pending;
  {
    MutexLock lock(requests_->mutex);
    pending.swap(requests_->pending);
  }
  for (const MutualRequest& request : pending) {
    try {
      if (request.failure) throw Error(*request.failure);
      connect(request);
    } catch (const Error& error) {
      departed(request.rank, error);
    }
  }
}

void PairConnections::connect(const MutualRequest& request) {
  const auto index = static_cast<std::size_t>(request.rank);
  const bool first = plan_.members.ranks[index] < plan_.members.ranks[static_cast<std::size_t>(plan_.rank)];
  ByteReader theirs(request.both.at(first ? 0 : 1));
  const auto nonce = theirs.get<std::uint64_t>();
  const std::string address = theirs.get_string();
  if (request.rank > plan_.rank) return;  // it dials
  links_.dial(request.rank, address, nonce, executor_.deadline_in(plan_.timeout));
}

/// No connection to the rank can be made.
void PairConnections::departed(int rank, const Error& cause) {
  if (cause.kind() == ErrorKind::kCancelled)
    return;  // the end of this worker's world is reported to the group
  loop_.departed(
      rank,
      Error(cause.kind(), fmt::format("no connection to {}: {}", plan_.members.name(rank), cause.message())),
      Departure::kAbsence);
}

void PairConnections::send(int rank, const GroupMessage& message, std::optional<Segment> segment) {
  Unsent unsent{encode(message), std::move(segment)};
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!peer.ready) {
      peer.queue.push_back(std::move(unsent));
      return;
    }
  }
  send_now(rank, unsent);
}

void PairConnections::send_now(int rank, const Unsent& message) {
  const auto channel = links_.channel_to(rank);
  if (!channel) return;
  try {
    channel->send(message.header,
                  message.segment ? std::span(&*message.segment, 1) : std::span<const Segment>());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDisconnected) return;  // on_end() reports it
    // The peer waits for a message that it will not get.
    loop_.departed(rank, error, Departure::kFailure);
    channel->close();
  }
}

/// Later messages are queued behind those that it sends, until none is left.
void PairConnections::send_queued(int rank) {
  for (;;) {
    std::deque<Unsent> queue;
    {
      MutexLock lock(mutex_);
      Peer& peer = peers_[static_cast<std::size_t>(rank)];
      peer.ready = peer.queue.empty();
      if (peer.ready) return;
      queue.swap(peer.queue);
    }
    for (const Unsent& one : queue) send_now(rank, one);
  }
}

void PairConnections::on_group_message(channels::GroupLinks&, int rank, const GroupMessage& message,
                                       std::vector<Buffer> segments) {
  loop_.received(rank, message, segments.empty() ? Buffer() : std::move(segments[0]));
}

void PairConnections::on_invalid(channels::GroupLinks&, int rank, const Error& cause) {
  if (const auto channel = links_.channel_to(rank)) channel->close();
  loop_.departed(rank, MessageErrors(plan_).invalid(rank, cause), Departure::kFailure);
}

void PairConnections::on_end(channels::GroupLinks&, int rank, LinkEnd how, const Error& reason) {
  if (how == LinkEnd::kExpected) return;
  if (how == LinkEnd::kNeverMet) {
    return departed(rank, Error(ErrorKind::kDisconnected, reason.message()));
  }
  loop_.departed(rank,
                 Error(ErrorKind::kDisconnected, fmt::format("the connection to {} ended: {}",
                                                             plan_.members.name(rank), reason.message())),
                 Departure::kFailure);
}

namespace {

/// Ranks that an error lists.
constexpr std::size_t kMostRanks = 8;

/// "worker1, worker2 and 3 more".
std::string list_some(const std::vector<std::string>& names, const char* separator) {
  const std::size_t shown = std::min(names.size(), kMostRanks);
  std::string text = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), separator));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace

Error MessageErrors::late(const MessageOperation& operation, const MessageQueue& queue,
                          const DepartedRanks& departed) const {
  return {ErrorKind::kTimedOut,
          fmt::format("{} of {} waited {:.3g} s: {}", operation.call(), name(plan_.rank),
                      to_seconds(plan_.timeout), awaited(operation, queue, departed))};
}

std::string MessageErrors::awaited(const MessageOperation& operation, const MessageQueue& queue,
                                   const DepartedRanks& departed) const {
  if (operation.peer == kNoPeer) return awaited_from_any(operation, queue, departed);
  const std::string& peer = name(operation.peer);
  if (operation.accepted) {
    return fmt::format("{} made the matching call, but {} of {} bytes arrived in time", peer, operation.moved,
                       operation.bytes());
  }
  std::string text = fmt::format("{} has not called {} rank {} with tag {}", peer,
                                 operation.sends ? "recv() from" : "send() to", plan_.rank, operation.tag);
  const std::string offers = queue.unmatched(operation.peer);
  if (!operation.sends && !offers.empty()) text += fmt::format("; it sends {}", offers);
  return text;
}

std::string MessageErrors::awaited_from_any(const MessageOperation& operation, const MessageQueue& queue,
                                            const DepartedRanks& departed) const {
  std::vector<std::string> waited_for, others;
  for (int rank = 0; rank < plan_.members.size(); ++rank) {
    if (rank == plan_.rank) continue;
    if (const auto& cause = departed[static_cast<std::size_t>(rank)]) {
      others.push_back(cause->message());
      continue;
    }
    waited_for.push_back(name(rank));
    const std::string offers = queue.unmatched(rank);
    if (!offers.empty()) others.push_back(fmt::format("{} sends {}", name(rank), offers));
  }
  std::string text = fmt::format("none of {} has called send() to rank {} with tag {}",
                                 list_some(waited_for, ", "), plan_.rank, operation.tag);
  if (!others.empty()) text += "; " + list_some(others, "; ");
  return text;
}

Error MessageErrors::mismatch(const MessageOperation& operation, const Offered& offered) const {
  return {ErrorKind::kInvalid,
          fmt::format(
              "{} called send({:.200} to rank {}, tag {}), and {} called {}: receive into a tensor of the "
              "dtype and shape that is sent",
              name(offered.rank), offered.offer.text, plan_.rank, offered.offer.tag, name(plan_.rank),
              operation.call())};
}

Error MessageErrors::no_sender(const MessageOperation& operation, const DepartedRanks& departed) const {
  std::vector<std::string> causes;
  for (const auto& cause : departed) {
    if (cause) causes.push_back(cause->message());
  }
  return {ErrorKind::kDisconnected, fmt::format("{} of {} waits, but no other rank can send: {}",
                                                operation.call(), name(plan_.rank), list_some(causes, "; "))};
}

Error MessageErrors::invalid(int rank, const Error& cause) const {
  return {ErrorKind::kInvalid,
          fmt::format(
              "{} sent an invalid message to the group: {}; do all ranks run the same version of TorchSpan?",
              name(rank), cause.message())};
}

namespace {

/// Tensors up to this size are sent with their offer.
constexpr std::size_t kWithOffer = std::size_t{32} << 10;
constexpr std::size_t kMessagePiece = std::size_t{1} << 20;
/// Bytes for one rank that are passed to its connection at once.
constexpr std::size_t kMostUnsentPieces = std::size_t{8} << 20;
constexpr Duration kForPieces = std::chrono::microseconds(500);
/// How often a failure of the group is looked for while messages are pending.
constexpr Duration kBetweenGroupLooks = std::chrono::milliseconds(20);
/// Operations that wait longer are listed, as far as they are among the first.
constexpr Duration kListedAfter = std::chrono::milliseconds(200);
constexpr int kMostListedMessages = 16;

}  // namespace

MessageLoop::MessageLoop(PairPlan plan, std::shared_ptr<Backend> backend)
    : plan_(std::move(plan)),
      errors_(plan_),
      backend_(std::move(backend)),
      executor_(plan_.world->runtime()->executor),
      causes_of_departure_(plan_.members.ranks.size()) {}

MessageLoop::~MessageLoop() { stop(Error(ErrorKind::kCancelled, "the group was destroyed")); }

void MessageLoop::add(const MessageOperationPtr& operation) {
  std::optional<Error> failure;
  bool begins = false;
  {
    MutexLock lock(mutex_);
    if (cause_) {
      failure = cause_->error;
    } else {
      new_.push_back(operation);
      begins = !std::exchange(starting_, true);
      if (connections_) connections_->wake();
    }
  }
  if (failure) return operation->fail(*failure);
  if (begins) start();
}

void MessageLoop::start() {
  std::deque<MessageOperationPtr> refused;
  try {
    auto connections = std::make_unique<PairConnections>(plan_, *this);
    MutexLock lock(mutex_);
    connections_ = std::move(connections);
    connections_->wake();
  } catch (const Error& error) {
    break_with(error, Tell::kNobody);
    {
      MutexLock lock(mutex_);
      refused.swap(new_);
    }
    for (const auto& operation : refused) operation->fail(error);
  }
}

void MessageLoop::break_with(const Error& error, Tell tell) {
  MutexLock lock(mutex_);
  if (cause_) return;
  cause_ = Cause{error, tell};
  if (connections_) connections_->wake();
}

/// Why the group broke, unless that is this rank's own end.
std::optional<channels::Abort> MessageLoop::announcement() {
  std::optional<Error> error;
  {
    MutexLock lock(mutex_);
    if (cause_ && cause_->tell == Tell::kPeers) return std::nullopt;
    if (cause_) error = cause_->error;
  }
  if (plan_.world->ended()) return std::nullopt;
  if (!error) error = backend_->failure();
  if (!error) return std::nullopt;
  return channels::Abort{error->kind(), 0, error->message()};
}

void MessageLoop::stop(const Error& error) {
  const auto announcement = this->announcement();
  break_with(error, Tell::kNobody);
  PairConnections* connections = nullptr;
  {
    MutexLock lock(mutex_);
    connections = connections_.get();
  }
  if (connections != nullptr) connections->stop(announcement);
  std::deque<MessageOperationPtr> left;
  std::optional<Cause> cause;
  {
    MutexLock lock(mutex_);
    left.swap(new_);
    cause = cause_;
  }
  for (auto& operation : queue_.take_all()) left.push_back(std::move(operation));
  for (const auto& operation : left) operation->fail(cause->error);
}

void MessageLoop::departed(int rank, const Error& cause, Departure how) {
  MutexLock lock(mutex_);
  departed_.push_back({rank, cause, how});
  if (connections_) connections_->wake();
}

Deadline MessageLoop::poll() {
  std::deque<MessageOperationPtr> operations;
  std::deque<Departed> departed;
  {
    MutexLock lock(mutex_);
    if (!connections_) return Deadline::never();
    operations.swap(new_);
    departed.swap(departed_);
  }
  for (const Departed& one : departed) handle(one);
  for (const auto& operation : operations) begin(operation);
  Deadline next = check();
  if (!failed_ && send_more()) next = earlier(next, executor_.deadline_in(kForPieces));
  std::optional<Cause> cause;
  {
    MutexLock lock(mutex_);
    cause = cause_;
  }
  if (!cause) return next;
  fail_all(*cause);
  return Deadline::never();
}

/// A rank that leaves, or was never connected, may have nothing to send to a recv() from any rank.
void MessageLoop::handle(const Departed& departed) {
  const bool breaks_receives = departed.how == Departure::kFailure && queue_.first_from_any();
  if (queue_.needs(departed.rank) || breaks_receives) break_without(departed.rank, departed.cause);
  causes_of_departure_[static_cast<std::size_t>(departed.rank)] = departed.cause;
  queue_.drop_offers(departed.rank);
}

const Error* MessageLoop::cause_of_departure(int rank) {
  const auto place = static_cast<std::size_t>(rank);
  std::optional<Error>& departed = causes_of_departure_[place];
  if (departed) return &*departed;
  const auto how = plan_.world->departed(plan_.members.instances[place]);
  if (!how) return nullptr;
  departed = Error(ErrorKind::kDisconnected, text_of_departed(plan_.members.names[place], *how));
  queue_.drop_offers(rank);
  return &*departed;
}

void MessageLoop::break_without(int rank, const Error& seen) {
  if (seen.kind() != ErrorKind::kDisconnected) return break_with(seen, Tell::kGroup);
  const std::string cause =
      plan_.world->cause_of_loss(plan_.members, {static_cast<std::size_t>(rank), seen.message()});
  break_with(Error(ErrorKind::kDisconnected, cause), Tell::kGroup);
}

void MessageLoop::begin(const MessageOperationPtr& operation) {
  if (operation->from_any) {
    for (int rank = 0; rank < plan_.members.size(); ++rank) {
      if (rank != plan_.rank && cause_of_departure(rank) == nullptr) connections_->open(rank);
    }
    return receive(operation);
  }
  const int peer = operation->peer;
  if (const Error* cause = cause_of_departure(peer)) break_without(peer, *cause);
  connections_->open(peer);
  if (!operation->sends) return receive(operation);
  const channels::Offer offer = queue_.add_send(operation);
  if (operation->bytes() > kWithOffer) return connections_->send(peer, offer);
  operation->moved = operation->bytes();
  connections_->send(peer, offer, Segment{operation->data(), operation->bytes(), operation});
}

void MessageLoop::receive(const MessageOperationPtr& operation) {
  const auto offered = queue_.add_receive(operation);
  if (!offered) return;
  try {
    match(operation, *offered);
  } catch (const Error& error) {  // what it sent with the offer does not fit
    break_with(errors_.invalid(offered->rank, error), Tell::kGroup);
  }
}

void MessageLoop::received(int rank, const channels::GroupMessage& note, Buffer data) {
  if (failed_) return;
  if (const auto* offer = std::get_if<channels::Offer>(&note)) {
    const Offered offered{rank, *offer, std::move(data)};
    if (const auto operation = queue_.take_receive(rank, offer->tag)) return match(operation, offered);
    queue_.keep(offered);
  } else if (const auto* accept = std::get_if<channels::Accept>(&note)) {
    queue_.sending(rank, accept->number)->accepted = true;
  } else if (const auto* piece = std::get_if<channels::Data>(&note)) {
    take_data(queue_.receiving(rank, piece->number), data);
  } else if (const auto* done = std::get_if<channels::Done>(&note)) {
    const auto operation = queue_.sending(rank, done->number);
    if (operation->moved != operation->bytes()) throw_invalid("it has not received all the data");
    queue_.finish(*operation);
    operation->succeed();
  } else if (const auto* abort = std::get_if<channels::Abort>(&note)) {
    break_with(Error(abort->kind, abort->text), Tell::kNobody);
  } else if (const auto* end = std::get_if<channels::End>(&note)) {
    const std::string& name = plan_.members.name(rank);
    departed(rank, Error(ErrorKind::kDisconnected, fmt::format("{} {}", name, end->text)),
             Departure::kAbsence);
  } else {
    throw_invalid("it belongs to another kind of connection");
  }
}

void MessageLoop::match(const MessageOperationPtr& operation, const Offered& offered) {
  queue_.begin_receiving(operation, offered.rank, offered.offer.number);
  if (offered.offer.text != operation->contents) {
    return break_with(errors_.mismatch(*operation, offered), Tell::kGroup);
  }
  if (operation->bytes() > kWithOffer) {
    connections_->send(offered.rank, channels::Accept{operation->number});
  } else {
    take_data(operation, offered.data);
  }
}

void MessageLoop::take_data(const MessageOperationPtr& operation, const Buffer& data) {
  const std::size_t left = operation->bytes() - operation->moved;
  if (data.size > left || (data.size == 0 && left != 0)) {
    throw_invalid("it sent {} bytes where {} more were expected", data.size, left);
  }
  if (data.size != 0) {
    std::memcpy(static_cast<std::byte*>(operation->work.data_ptr()) + operation->moved, data.data, data.size);
  }
  operation->moved += data.size;
  if (operation->moved == operation->bytes()) complete(operation);
}

void MessageLoop::complete(const MessageOperationPtr& operation) {
  queue_.finish(*operation);
  try {
    put_back(operation->work, operation->tensor);
  } catch (...) {
    operation->fail(to_error(std::current_exception()));
    return break_with(to_error(std::current_exception()), Tell::kGroup);
  }
  connections_->send(operation->peer, channels::Done{operation->number});
  operation->succeed();
}

Deadline MessageLoop::check() {
  if (failed_) return Deadline::never();
  const TimePoint now = executor_.now();
  Deadline next = Deadline::never();
  MessageOperationPtr late;
  bool any = false;
  queue_.visit([&](const MessageOperationPtr& operation) {
    any = true;
    next = earlier(next, operation->deadline);
    if (!late && operation->deadline.passed(now)) late = operation;
  });
  if (!any) return next;
  check_senders();
  if (late) {
    report_timeout({.kind = "message",
                    .name = late->call(),
                    .detail = errors_.awaited(*late, queue_, causes_of_departure_),
                    .seconds = to_seconds(now - late->began),
                    .id = late->number,
                    .part = group_number(plan_.members.ranks, plan_.group)});
    break_with(errors_.late(*late, queue_, causes_of_departure_), Tell::kGroup);
  }
  list_waiting(now);
  if (const auto cause = backend_->failure()) break_with(*cause, Tell::kNobody);
  return earlier(next, Deadline(now + kBetweenGroupLooks));
}

void MessageLoop::check_senders() {
  const MessageOperationPtr waiting = queue_.first_from_any();
  if (!waiting) return;
  for (int rank = 0; rank < plan_.members.size(); ++rank) {
    if (rank != plan_.rank && cause_of_departure(rank) == nullptr) return;
  }
  break_with(errors_.no_sender(*waiting, causes_of_departure_), Tell::kGroup);
}

void MessageLoop::list_waiting(TimePoint now) {
  int listed = 0;
  queue_.visit([&](const MessageOperationPtr& operation) {
    if (now - operation->began < kListedAfter || ++listed > kMostListedMessages || operation->listed) return;
    const int peer = operation->peer;
    operation->listed = std::make_unique<SpanScope>(
        plan_.world->runtime()->spans, kMessageSpan, operation->call(),
        SpanLink{.id = operation->number,
                 .peer = peer == kNoPeer ? -1 : plan_.members.ranks[static_cast<std::size_t>(peer)],
                 .part = group_number(plan_.members.ranks, plan_.group),
                 .bytes = operation->bytes()});
  });
}

bool MessageLoop::send_more() {
  bool left = false;
  queue_.visit([&](const MessageOperationPtr& operation) {
    if (!operation->sends || !operation->accepted) return;
    while (operation->moved < operation->bytes()) {
      if (connections_->unsent_bytes(operation->peer) >= kMostUnsentPieces) {
        left = true;
        return;
      }
      const std::size_t size = std::min(kMessagePiece, operation->bytes() - operation->moved);
      connections_->send(operation->peer, channels::Data{operation->number},
                         Segment{operation->data() + operation->moved, size, operation});
      operation->moved += size;
    }
  });
  return left;
}

void MessageLoop::fail_all(const Cause& cause) {
  std::deque<MessageOperationPtr> pending;
  {
    MutexLock lock(mutex_);
    pending.swap(new_);
  }
  for (auto& operation : queue_.take_all()) pending.push_back(std::move(operation));
  if (!std::exchange(failed_, true)) {
    if (cause.tell == Tell::kPeers) connections_->end("has left the world");
    if (cause.tell == Tell::kGroup) {
      backend_->abort(cause.error);
      const channels::Abort abort{cause.error.kind(), 0, cause.error.message()};
      for (int rank = 0; rank < plan_.members.size(); ++rank) connections_->send(rank, abort);
    }
  }
  for (const auto& operation : pending) operation->fail(cause.error);
}

}  // namespace torchspan::collective
