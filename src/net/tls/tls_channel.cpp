#include "net/tls/tls_channel.h"

#include <algorithm>
#include <exception>
#include <fmt/format.h>

#include "net/channel_errors.h"
#include "net/stream/socket.h"
#include "net/tls/pieces.h"

namespace torchspan::net {
namespace {

/// Most bytes that one call writes while it holds the lock: a socket whose peer keeps up would accept a
/// message of any size. send() queues the rest; the driver, which also serves other peers, leaves it to the
/// next event.
constexpr std::uint64_t kMostDirect = 16 << 20;
constexpr std::uint64_t kMostFlushed = 4 << 20;

/// Cuts the bytes of segments, as one sequence, into slices.
class Slicer {
 public:
  explicit Slicer(std::span<const Segment> segments) : segments_(segments) {}
  /// The next `size` bytes, which must exist.
  std::span<const Segment> next(std::uint64_t size) {
    slices_.clear();
    while (size != 0) {
      const Segment& segment = segments_[index_];
      const std::uint64_t taken = std::min<std::uint64_t>(size, segment.size - offset_);
      if (taken != 0) slices_.push_back({segment.data + offset_, taken, segment.keep});
      size -= taken;
      offset_ += taken;
      if (offset_ == segment.size) {
        ++index_;
        offset_ = 0;
      }
    }
    return slices_;
  }

 private:
  const std::span<const Segment> segments_;
  std::size_t index_ = 0;
  std::uint64_t offset_ = 0;
  std::vector<Segment> slices_;
};

std::uint64_t bytes_of(std::span<const Segment> segments) {
  std::uint64_t bytes = 0;
  for (const Segment& segment : segments) bytes += segment.size;
  return bytes;
}

}  // namespace

TlsChannel::TlsChannel(Options options, std::shared_ptr<TlsRequestQueue> request_queue)
    : options_(std::move(options)), request_queue_(std::move(request_queue)), lanes_(1) {}

void TlsChannel::send(BytesView header, std::span<const Segment> segments) {
  const std::uint64_t size = check_message(header, segments, options_.limits);
  const bool large = bytes_of(segments) >= kWorthStriping;
  Afterwards afterwards;
  std::optional<FramePrefix> prefix;  // its bytes may be copied late
  {
    MutexLock lock(mutex_);
    if (ended_ || closing_) throw_ended();
    const std::uint64_t waiting = waiting_locked();
    if (waiting != 0 && waiting + size > options_.max_unsent)
      throw peer_overloaded(options_.peer, waiting, size, options_.max_unsent);
    const bool striped = large && lanes_.size() > 1;
    prefix.emplace(header, segments, striped ? FrameType::kStriped : FrameType::kMessage);
    Outgoing message(prefix->bytes(), header, striped ? std::span<const Segment>() : segments);
    const bool held = corked_ && may_hold(size);
    if (corked_ && !held) flush_lane(lanes_[0], afterwards.released);
    if (ended_) throw_ended();
    const bool was_idle = !held && (waiting == 0 || corked_);
    direct_left_ = held ? 0 : kMostDirect;
    put(0, message, afterwards);
    if (striped) stripe(segments, afterwards);
    note_unsent();
    if (was_idle && lanes_[0].session && unsent_.load(std::memory_order_relaxed) != 0) {
      request_queue_->post_review(options_.token);
    }
  }
  if (!afterwards.late.empty()) copy_late(afterwards);
}

void TlsChannel::copy_late(Afterwards& afterwards) {
  bool copied = true;
  try {
    afterwards.late.make();
  } catch (const std::exception&) {
    copied = false;
  }
  MutexLock lock(mutex_);
  if (ended_) return;  // its end is reported to the handler
  if (!copied) break_without_memory(afterwards.released);
  for (std::size_t i = 0; i < lanes_.size(); ++i) afterwards.late.fill(lanes_[i].outbox, i);
  flush_locked(afterwards.released);
  if (!ended_ && unsent_.load(std::memory_order_relaxed) != 0) request_queue_->post_review(options_.token);
}

std::uint64_t TlsChannel::waiting_locked() const {
  std::uint64_t bytes = 0;
  for (const Lane& lane : lanes_) bytes += lane.waiting();
  return bytes;
}

void TlsChannel::note_unsent() { unsent_.store(waiting_locked(), std::memory_order_relaxed); }

bool TlsChannel::may_hold(std::uint64_t size) const {
  return size <= kSmallMessage && lanes_[0].outbox.size() + size <= kMaxCorked;
}

void TlsChannel::put(std::size_t index, Outgoing& bytes, Afterwards& afterwards) {
  std::array<iovec, kSendIovecs> places;
  Lane& lane = lanes_[index];
  if (lane.idle()) {
    while (!bytes.done() && direct_left_ != 0) {
      const std::size_t count = bytes.front(places);
      const ssize_t written = lane.session->write(std::span(places).first(count));
      if (written < 0) {
        break_locked(lane.session->broken(), afterwards.released);
        throw_ended();
      }
      if (written == 0) break;
      wrote_ = true;
      direct_left_ -= std::min(direct_left_, static_cast<std::uint64_t>(written));
      bytes.consume(static_cast<std::size_t>(written));
    }
  }
  if (bytes.done()) return;
  try {
    bytes.queue_rest(lane.outbox, afterwards.late, index);
  } catch (const std::exception&) {
    break_without_memory(afterwards.released);
  }
}

void TlsChannel::break_without_memory(Released& released) {
  // Part of the message may be on the wire: the stream cannot be continued.
  break_locked("no memory left to queue a message", released);
  throw no_memory_to_queue(options_.peer);
}

std::size_t TlsChannel::emptiest_lane() {
  const auto emptiest = std::min_element(lanes_.begin() + 1, lanes_.end(), [](const Lane& a, const Lane& b) {
    return a.waiting() < b.waiting();
  });
  return static_cast<std::size_t>(emptiest - lanes_.begin());
}

void TlsChannel::stripe(std::span<const Segment> segments, Afterwards& afterwards) {
  const std::uint64_t message = striped_++;
  std::uint64_t left = bytes_of(segments);
  Slicer slicer(segments);
  for (std::uint32_t index = 0; left != 0; ++index) {
    const std::uint64_t size = std::min(left, kPieceBytes);
    const auto prefix = piece_prefix(message, index);
    Outgoing piece(prefix, {}, slicer.next(size));
    put(emptiest_lane(), piece, afterwards);
    left -= size;
  }
}

void TlsChannel::close() {
  Released released;
  MutexLock lock(mutex_);
  if (ended_ || closing_) return;
  closing_ = true;
  lanes_[0].outbox.copy(goodbye_frame());
  flush_locked(released);
  request_queue_->post_review(options_.token);
}

void TlsChannel::open(std::shared_ptr<TlsSession> first) {
  Released released;
  MutexLock lock(mutex_);
  opened_.store(true, std::memory_order_release);
  lanes_[0].session = std::move(first);
  flush_locked(released);
}

std::size_t TlsChannel::add_lane(std::shared_ptr<TlsSession> lane) {
  MutexLock lock(mutex_);
  if (!ended_) lanes_.emplace_back().session = std::move(lane);
  return lanes_.size() - 1;
}

void TlsChannel::flush() {
  Released released;
  MutexLock lock(mutex_);
  flush_locked(released);
}

void TlsChannel::cork() {
  MutexLock lock(mutex_);
  corked_ = true;
}

void TlsChannel::uncork() {
  Released released;
  MutexLock lock(mutex_);
  corked_ = false;
  flush_locked(released);
  if (!ended_ && unsent_.load(std::memory_order_relaxed) != 0) request_queue_->post_review(options_.token);
}

void TlsChannel::flush_locked(Released& released) {
  for (Lane& lane : lanes_) {
    if (!ended_) flush_lane(lane, released);
  }
  note_unsent();
}

void TlsChannel::flush_lane(Lane& lane, Released& released) {
  std::array<iovec, kSendIovecs> places;
  if (!lane.session) return;
  if (lane.session->unsent() != 0 && !lane.session->flush()) {
    return break_locked(lane.session->broken(), released);
  }
  std::uint64_t flushed = 0;
  while (lane.outbox.ready() && flushed < kMostFlushed) {
    const std::size_t count = lane.outbox.front(places);
    const ssize_t written = lane.session->write(std::span(places).first(count));
    if (written < 0) return break_locked(lane.session->broken(), released);
    if (written == 0) return;
    wrote_ = true;
    flushed += static_cast<std::uint64_t>(written);
    lane.outbox.consume(static_cast<std::size_t>(written), released);
  }
}

void TlsChannel::beat() {
  Released released;
  MutexLock lock(mutex_);
  if (ended_ || closing_ || std::exchange(wrote_, false) || !lanes_[0].idle()) return;
  const auto frame = heartbeat_frame();
  lanes_[0].outbox.copy(frame);
  flush_lane(lanes_[0], released);
  note_unsent();
  wrote_ = false;
}

void TlsChannel::break_locked(const std::string& why, Released& released) {
  broken_ = fmt::format("the connection broke ({})", why);
  ended_ = broken_;
  for (Lane& lane : lanes_) lane.outbox.clear(released);
  unsent_.store(0, std::memory_order_relaxed);
  request_queue_->post_review(options_.token);
}

TlsChannel::State TlsChannel::state() const {
  MutexLock lock(mutex_);
  State state{.closing = closing_, .broken = broken_};
  bool idle = true;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].idle()) continue;
    idle = false;
    if (lanes_[i].can_flush()) state.flushing |= 1u << i;
  }
  state.said_goodbye = closing_ && idle && !broken_;
  return state;
}

void TlsChannel::end(const Error& reason) {
  Released released;
  std::vector<Lane> dropped(1);
  MutexLock lock(mutex_);
  ended_ = reason.message();
  for (Lane& lane : lanes_) lane.outbox.clear(released);
  lanes_.swap(dropped);
  unsent_.store(0, std::memory_order_relaxed);
}

void TlsChannel::throw_ended() const { throw nothing_can_be_sent(options_.peer, ended_); }

std::shared_ptr<TlsChannel> make_tls_channel(std::string peer, std::uint64_t token,
                                             const TransportOptions& options,
                                             std::shared_ptr<TlsRequestQueue> request_queue) {
  return std::make_shared<TlsChannel>(
      TlsChannel::Options{std::move(peer), token, limits_of(options), options.max_unsent},
      std::move(request_queue));
}

}  // namespace torchspan::net
