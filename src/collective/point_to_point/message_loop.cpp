#include "collective/point_to_point/message_loop.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <torchspan/detail/core/runtime.h>

#include "collective/tensors.h"

namespace torchspan::collective {
namespace {

/// Tensors up to this size travel with their offer.
constexpr std::size_t kWithOffer = std::size_t{32} << 10;
constexpr std::size_t kMessagePiece = std::size_t{1} << 20;
/// Bytes for one rank that are handed to its connection at once.
constexpr std::size_t kMostUnsentPieces = std::size_t{8} << 20;
constexpr Duration kForPieces = std::chrono::microseconds(500);
/// How often a failure of the group is looked for while messages are pending.
constexpr Duration kBetweenGroupLooks = std::chrono::milliseconds(20);

}  // namespace

MessageLoop::MessageLoop(PairPlan plan, std::shared_ptr<Backend> backend)
    : plan_(std::move(plan)),
      backend_(std::move(backend)),
      executor_(plan_.world->runtime()->executor),
      queues_(plan_.ranks.size()),
      gone_(plan_.ranks.size()) {}

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
  if (failure) return fail(*operation, *failure);
  if (begins) start();
}

void MessageLoop::start() {
  std::deque<MessageOperationPtr> refused;
  try {
    PairEvents& events = *this;
    auto connections = std::make_unique<PairConnections>(plan_, events);
    MutexLock lock(mutex_);
    connections_ = std::move(connections);
    connections_->wake();
  } catch (const Error& error) {
    break_with(error, Tell::kNobody);
    {
      MutexLock lock(mutex_);
      refused.swap(new_);
    }
    for (const auto& operation : refused) fail(*operation, error);
  }
}

void MessageLoop::break_with(const Error& error, Tell tell) {
  MutexLock lock(mutex_);
  if (cause_) return;
  cause_ = Cause{error, tell};
  if (connections_) connections_->wake();
}

void MessageLoop::stop(const Error& error) {
  break_with(error, Tell::kNobody);
  PairConnections* connections = nullptr;
  {
    MutexLock lock(mutex_);
    connections = connections_.get();
  }
  if (connections != nullptr) connections->stop();
  std::deque<MessageOperationPtr> left;
  std::optional<Cause> cause;
  {
    MutexLock lock(mutex_);
    left.swap(new_);
    cause = cause_;
  }
  for (MessageQueue& queue : queues_) {
    for (auto& operation : queue.take_all()) left.push_back(std::move(operation));
  }
  for (const auto& operation : left) fail(*operation, cause->error);
}

void MessageLoop::fail(MessageOperation& operation, const Error& error) {
  operation.promise->set_error(Error(error).with_call(operation.call()));
}

void MessageLoop::lost(int rank, const Error& cause) {
  MutexLock lock(mutex_);
  lost_.push_back({rank, cause});
  if (connections_) connections_->wake();
}

Deadline MessageLoop::look() {
  std::deque<MessageOperationPtr> operations;
  std::deque<Lost> lost;
  {
    MutexLock lock(mutex_);
    if (!connections_) return Deadline::never();
    operations.swap(new_);
    lost.swap(lost_);
  }
  for (Lost& one : lost) {
    if (!queue(one.rank).empty()) break_with(one.cause, Tell::kGroup);
    gone_[static_cast<std::size_t>(one.rank)] = std::move(one.cause);
  }
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

void MessageLoop::begin(const MessageOperationPtr& operation) {
  const int peer = operation->peer;
  MessageQueue& queue = this->queue(peer);
  if (const auto& gone = gone_[static_cast<std::size_t>(peer)]) break_with(*gone, Tell::kGroup);
  if (const auto how = plan_.world->gone(plan_.instances[static_cast<std::size_t>(peer)])) {
    break_with(Error(ErrorKind::kDisconnected, fmt::format("{} is gone: {}", name(peer), *how)),
               Tell::kGroup);
  }
  connections_->open(peer);
  if (!operation->sends) {
    if (const auto offered = queue.add_receive(operation)) match(operation, *offered);
    return;
  }
  const channels::Offer offer = queue.add_send(operation);
  if (operation->bytes() > kWithOffer) return connections_->send(peer, offer);
  operation->moved = operation->bytes();
  connections_->send(peer, offer, Segment{operation->data(), operation->bytes(), operation});
}

void MessageLoop::received(int rank, const channels::Note& note, Buffer data) {
  if (failed_) return;
  MessageQueue& queue = this->queue(rank);
  if (const auto* offer = std::get_if<channels::Offer>(&note)) {
    const Offered offered{*offer, std::move(data)};
    if (const auto operation = queue.take_receive(offer->tag)) return match(operation, offered);
    queue.keep(offered);
  } else if (const auto* accept = std::get_if<channels::Accept>(&note)) {
    queue.sending(accept->number)->accepted = true;
  } else if (const auto* piece = std::get_if<channels::Data>(&note)) {
    take_data(queue.receiving(piece->number), data);
  } else if (const auto* done = std::get_if<channels::Done>(&note)) {
    const auto operation = queue.sending(done->number);
    if (operation->moved != operation->bytes())
      throw Error(ErrorKind::kInvalid, "it has not got all the data");
    queue.finish(*operation);
    operation->promise->set_value(operation->tensor);
  } else if (const auto* abort = std::get_if<channels::Abort>(&note)) {
    break_with(Error(abort->kind, abort->text), Tell::kNobody);
  } else if (const auto* end = std::get_if<channels::End>(&note)) {
    lost(rank, Error(ErrorKind::kDisconnected, fmt::format("{} {}", name(rank), end->text)));
  } else {
    throw Error(ErrorKind::kInvalid, "it belongs to another kind of connection");
  }
}

void MessageLoop::match(const MessageOperationPtr& operation, const Offered& offered) {
  const int peer = operation->peer;
  queue(peer).begin_receiving(operation, offered.offer.number);
  if (offered.offer.text != operation->contents) {
    return break_with(
        Error(
            ErrorKind::kInvalid,
            fmt::format(
                "{} called send({:.200} to rank {}, tag {}), and {} called {}: receive into a tensor of the "
                "dtype and shape that is sent",
                name(peer), offered.offer.text, plan_.rank, offered.offer.tag, name(plan_.rank),
                operation->call())),
        Tell::kGroup);
  }
  if (operation->bytes() > kWithOffer) {
    connections_->send(peer, channels::Accept{operation->number});
  } else {
    take_data(operation, offered.data);
  }
}

void MessageLoop::take_data(const MessageOperationPtr& operation, const Buffer& data) {
  const std::size_t left = operation->bytes() - operation->moved;
  if (data.size > left || (data.size == 0 && left != 0)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("it sent {} bytes where {} more were expected", data.size, left));
  }
  if (data.size != 0) {
    std::memcpy(static_cast<std::byte*>(operation->work.data_ptr()) + operation->moved, data.data, data.size);
  }
  operation->moved += data.size;
  if (operation->moved == operation->bytes()) complete(operation);
}

void MessageLoop::complete(const MessageOperationPtr& operation) {
  queue(operation->peer).finish(*operation);
  try {
    put_back(operation->work, operation->tensor);
  } catch (...) {
    fail(*operation, to_error(std::current_exception()));
    return break_with(to_error(std::current_exception()), Tell::kGroup);
  }
  connections_->send(operation->peer, channels::Done{operation->number});
  operation->promise->set_value(operation->tensor);
}

Deadline MessageLoop::check() {
  if (failed_) return Deadline::never();
  const TimePoint now = executor_.now();
  Deadline next = Deadline::never();
  for (const MessageQueue& queue : queues_) {
    queue.visit([&](const MessageOperationPtr& operation) {
      next = earlier(next, operation->deadline);
      if (operation->deadline.passed(now)) break_with(late(*operation), Tell::kGroup);
    });
  }
  if (next.is_never()) return next;
  if (const auto cause = backend_->failure()) break_with(*cause, Tell::kNobody);
  return earlier(next, Deadline(now + kBetweenGroupLooks));
}

bool MessageLoop::send_more() {
  bool left = false;
  for (const MessageQueue& queue : queues_) {
    queue.visit([&](const MessageOperationPtr& operation) {
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
  }
  return left;
}

void MessageLoop::fail_all(const Cause& cause) {
  std::deque<MessageOperationPtr> pending;
  {
    MutexLock lock(mutex_);
    pending.swap(new_);
  }
  for (MessageQueue& queue : queues_) {
    for (auto& operation : queue.take_all()) pending.push_back(std::move(operation));
  }
  if (!std::exchange(failed_, true)) {
    if (cause.tell == Tell::kPeers) connections_->end(channels::End{"has left the world"});
    if (cause.tell == Tell::kGroup) {
      backend_->abort(cause.error);
      const channels::Abort abort{cause.error.kind(), 0, cause.error.message()};
      for (int rank = 0; rank < static_cast<int>(plan_.ranks.size()); ++rank) connections_->send(rank, abort);
    }
  }
  for (const auto& operation : pending) fail(*operation, cause.error);
}

Error MessageLoop::late(const MessageOperation& operation) const {
  const std::string& peer = name(operation.peer);
  std::string why;
  if (operation.accepted) {
    why = fmt::format("{} made the matching call, but {} of {} bytes arrived in time", peer, operation.moved,
                      operation.bytes());
  } else {
    why = fmt::format("{} has not called {} rank {} with tag {}", peer,
                      operation.sends ? "recv() from" : "send() to", plan_.rank, operation.tag);
    const std::string offers = queues_[static_cast<std::size_t>(operation.peer)].unmatched();
    if (!operation.sends && !offers.empty()) why += fmt::format("; it sends {}", offers);
  }
  return {ErrorKind::kTimedOut, fmt::format("{} of {} waited {:.3g} s: {}", operation.call(),
                                            name(plan_.rank), to_seconds(plan_.timeout), why)};
}

}  // namespace torchspan::collective
