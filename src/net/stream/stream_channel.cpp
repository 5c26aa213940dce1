#include "net/stream/stream_channel.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <fmt/format.h>
#include <limits>
#include <sys/socket.h>

#include "net/channel_errors.h"
#include "net/stream/socket.h"

namespace torchspan::net {
namespace {

/// Most bytes that one call writes while it holds the lock: a peer that keeps up would accept a message of any size. send()
/// queues the rest; the driver, which also serves other peers, leaves it to its next turn.
constexpr std::uint64_t kMostWritten = 16 << 20;
constexpr std::uint64_t kMostFlushedAtOnce = 4 << 20;

}  // namespace

/// The segments of a message, some of them as blocks that the peer adopts. Takes back blocks that were not
/// sent.
class StreamChannel::Lending {
 public:
  Lending(std::shared_ptr<Lender> lender, std::size_t from, std::span<const Segment> segments)
      : lender_(std::move(lender)), pieces_(segments) {
    if (lender_ == nullptr) return;
    blocks_.resize(segments.size());
    replaced_.assign(segments.begin(), segments.end());
    for (std::size_t i = 0; i < segments.size(); ++i) {
      if (segments[i].size < from || (blocks_[i] = lender_->lend(segments[i])) == 0) continue;
      saved_ += segments[i].size - kBlockNumberBytes;
      replaced_[i] = {reinterpret_cast<const std::byte*>(&blocks_[i]), kBlockNumberBytes, nullptr};
    }
    pieces_ = replaced_;
  }
  ~Lending() {
    for (const std::uint64_t block : blocks_) {
      if (!sent_ && block != 0) lender_->take_back(block);
    }
  }
  Lending(const Lending&) = delete;
  Lending& operator=(const Lending&) = delete;

  std::span<const std::uint64_t> blocks() const { return blocks_; }
  std::span<const Segment> pieces() const { return pieces_; }
  /// Bytes that are in blocks instead of the frame.
  std::uint64_t saved() const { return saved_; }
  void sent() { sent_ = true; }

 private:
  const std::shared_ptr<Lender> lender_;
  std::span<const Segment> pieces_;
  std::vector<std::uint64_t> blocks_;
  std::vector<Segment> replaced_;
  std::uint64_t saved_ = 0;
  bool sent_ = false;
};

StreamChannel::StreamChannel(Options options, std::shared_ptr<StreamRequestQueue> request_queue)
    : options_(std::move(options)),
      request_queue_(std::move(request_queue)),
      lend_from_(std::numeric_limits<std::size_t>::max()) {}

std::shared_ptr<Lender> StreamChannel::lender_for(std::span<const Segment> segments) const {
  const std::size_t from = lend_from_.load(std::memory_order_relaxed);
  if (std::ranges::none_of(segments, [&](const Segment& segment) { return segment.size >= from; })) {
    return nullptr;
  }
  MutexLock lock(mutex_);
  return closing_ ? nullptr : lender_;
}

void StreamChannel::send(BytesView header, std::span<const Segment> segments) {
  std::uint64_t size = check_message(header, segments, options_.limits);
  Lending lending(lender_for(segments), lend_from_.load(std::memory_order_relaxed), segments);
  size -= lending.saved();
  const FramePrefix prefix(header, segments, lending.blocks());
  Outgoing message(prefix.bytes(), header, lending.pieces());
  LateCopies late;
  {
    Released released;
    MutexLock lock(mutex_);
    send_locked(message, size, late, released);
    lending.sent();
  }
  if (!late.empty()) copy_late(late);
}

void StreamChannel::send_locked(Outgoing& message, std::uint64_t size, LateCopies& late, Released& released) {
  if (ended_ || closing_) throw_ended();
  if (!outbox_.empty() && outbox_.size() + size > options_.max_unsent)
    throw peer_overloaded(options_.peer, outbox_.size(), size, options_.max_unsent);
  const bool held = may_hold(size);
  if (corked_ && !held) flush_locked(released);
  if (ended_) throw_ended();
  const bool direct = socket_ >= 0 && outbox_.empty() && !held;
  if (direct) write_locked(message, released);
  if (!message.done()) queue_locked(message, late, released);
  if (direct && !message.done()) request_queue_->post_review(options_.token);
}

bool StreamChannel::may_hold(std::uint64_t size) const {
  return corked_ && lane_ == nullptr && size <= kSmallMessage && outbox_.size() + size <= kMaxCorked;
}

void StreamChannel::cork() {
  MutexLock lock(mutex_);
  corked_ = true;
}

void StreamChannel::uncork() {
  Released released;
  MutexLock lock(mutex_);
  corked_ = false;
  flush_locked(released);
  if (!ended_ && !outbox_.empty()) request_queue_->post_review(options_.token);
}

void StreamChannel::write_locked(Outgoing& message, Released& released) {
  std::array<iovec, kSendIovecs> places;
  std::uint64_t total = 0;
  while (!message.done() && total < kMostWritten) {
    const std::size_t count = message.front(places);
    const ssize_t written = put_locked(std::span(places).first(count));
    if (written == 0) return;
    if (written < 0) {
      break_locked(std::strerror(errno), released);
      throw_ended();
    }
    message.consume(static_cast<std::size_t>(written));
    total += static_cast<std::uint64_t>(written);
  }
}

ssize_t StreamChannel::put_locked(std::span<iovec> places) {
  if (lane_ == nullptr) return send_now(socket_, places);
  const ssize_t written = lane_->write(places);
  if (written < 0) errno = EPROTO;
  return written;
}

void StreamChannel::queue_locked(const Outgoing& message, LateCopies& late, Released& released) {
  try {
    message.queue_rest(outbox_, late);
  } catch (const std::exception&) {
    break_without_memory(released);
  }
  note_unsent();
}

void StreamChannel::copy_late(LateCopies& late) {
  Released released;
  bool copied = true;
  try {
    late.make();
  } catch (const std::exception&) {
    copied = false;
  }
  MutexLock lock(mutex_);
  if (ended_) return;  // its end is reported to the handler
  if (!copied) break_without_memory(released);
  late.fill(outbox_, 0);
  flush_locked(released);
  if (!ended_ && !outbox_.empty()) request_queue_->post_review(options_.token);
}

void StreamChannel::break_without_memory(Released& released) {
  // Part of the message may be on the wire: the stream cannot be continued.
  break_locked("no memory left to queue a message", released);
  throw no_memory_to_queue(options_.peer);
}

void StreamChannel::note_unsent() {
  unsent_.store(outbox_.size(), std::memory_order_relaxed);
  can_flush_.store(outbox_.ready(), std::memory_order_relaxed);
}

void StreamChannel::close() {
  Released released;
  MutexLock lock(mutex_);
  if (ended_ || closing_) return;
  closing_ = true;
  outbox_.copy(goodbye_frame());
  if (socket_ >= 0) flush_locked(released);
  request_queue_->post_review(options_.token);
}

StreamChannel::State StreamChannel::open(int socket, Lane* lane) {
  Released released;
  MutexLock lock(mutex_);
  opened_.store(true, std::memory_order_release);
  socket_ = socket;
  lane_ = lane;
  if (lane != nullptr) {
    lender_ = lane->lender();
    lend_from_.store(lane->lend_from(), std::memory_order_relaxed);
  }
  flush_locked(released);
  return state_locked();
}

StreamChannel::State StreamChannel::flush() {
  Released released;
  MutexLock lock(mutex_);
  flush_locked(released);
  return state_locked();
}

void StreamChannel::flush_locked(Released& released) {
  std::array<iovec, kSendIovecs> places;
  std::uint64_t flushed = 0;
  while (outbox_.ready() && socket_ >= 0 && !broken_ && flushed < kMostFlushedAtOnce) {
    const std::size_t count = outbox_.front(places);
    const ssize_t written = put_locked(std::span(places).first(count));
    if (written == 0) break;
    if (written < 0) return break_locked(std::strerror(errno), released);
    outbox_.consume(static_cast<std::size_t>(written), released);
    flushed += static_cast<std::uint64_t>(written);
  }
  note_unsent();
}

void StreamChannel::break_locked(const std::string& why, Released& released) {
  broken_ = fmt::format("the connection broke ({})", why);
  ended_ = broken_;
  outbox_.clear(released);
  note_unsent();
  request_queue_->post_review(options_.token);
}

StreamChannel::State StreamChannel::state() const {
  MutexLock lock(mutex_);
  return state_locked();
}

StreamChannel::State StreamChannel::state_locked() const {
  return {.flushing = socket_ >= 0 && lane_ == nullptr && outbox_.ready(),
          .closing = closing_,
          .said_goodbye = closing_ && socket_ >= 0 && outbox_.empty() && !broken_,
          .broken = broken_};
}

void StreamChannel::end(const Error& reason) {
  Released released;
  MutexLock lock(mutex_);
  socket_ = -1;
  lane_ = nullptr;
  lend_from_.store(std::numeric_limits<std::size_t>::max(), std::memory_order_relaxed);
  released.push_back(std::move(lender_));
  ended_ = reason.message();
  outbox_.clear(released);
  note_unsent();
}

void StreamChannel::throw_ended() const { throw nothing_can_be_sent(options_.peer, ended_); }

}  // namespace torchspan::net
