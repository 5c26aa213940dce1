#include "net/ucx/ucx_channel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <utility>

#include "net/channel_errors.h"

namespace torchspan::net {
namespace {

constexpr std::size_t kMostChunksUnderWay = 64;
/// Offers segments while the peer has fewer unfetched bytes than this.
constexpr std::size_t kMostOffered = 16 << 20;
constexpr std::size_t kUcxIovecs = 16;
constexpr std::size_t kLargeCopy = 64 << 10;
/// Bytes of the stream that one call sends; the driver sends the rest.
constexpr std::size_t kMostAtOnce = 4 << 20;

/// Copies those borrowed segments, the header first, that are sent beside the stream, or are large.
std::vector<Segment> hold_large(BytesView header, std::span<const Segment> segments, std::size_t apart_from) {
  std::vector<Segment> held{{header.data(), header.size(), nullptr}};
  held.insert(held.end(), segments.begin(), segments.end());
  for (Segment& segment : held) {
    if (segment.keep || segment.size < std::min(apart_from, kLargeCopy)) continue;
    const Buffer copy = allocate_buffer(segment.size);
    std::memcpy(copy.data, segment.data, segment.size);
    segment = {copy.data, segment.size, copy.owner};
  }
  return held;
}

bool uses_rendezvous(const Segment& segment, std::size_t from) {
  return segment.size >= from || segment.device_target != 0;
}

}  // namespace

UcxChannel::UcxChannel(Options options, std::shared_ptr<UcxRequestQueue> request_queue)
    : options_(std::move(options)), request_queue_(std::move(request_queue)) {}

void UcxChannel::send(BytesView header, std::span<const Segment> segments) {
  const std::uint64_t size = check_message(header, segments, options_.limits);
  {
    MutexLock lock(mutex_);
    if (ended_ || broken_ || closing_) throw_ended();
    const std::uint64_t waiting = unsent_bytes();
    if (waiting != 0 && waiting + size > options_.max_unsent)
      throw peer_overloaded(options_.peer, waiting, size, options_.max_unsent);
  }
  // Large copies are made without the lock.
  const std::vector<Segment> held = hold_large(header, segments, options_.rendezvous_from);
  Released released;
  MutexLock lock(mutex_);
  if (ended_ || broken_ || closing_) throw_ended();
  try {
    queue(held.front(), std::span(held).subspan(1));
  } catch (const std::exception&) {
    // Part of the message may be in the stream, which cannot be continued.
    broken_ = "no memory left to queue a message";
    request_queue_->post_review(options_.token);
    throw no_memory_to_queue(options_.peer);
  }
  flush_locked(false, released);
}

void UcxChannel::queue(const Segment& header, std::span<const Segment> segments) {
  std::vector<std::uint64_t> announced(segments.size());
  std::uint64_t next = first_apart_ + apart_.size();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (uses_rendezvous(segments[i], options_.rendezvous_from))
      announced[i] = UcxAnnouncement{next++, segments[i].device_target}.word();
  }
  const std::size_t before = outbox_.size();
  const BytesView header_bytes{header.data, header.size};
  outbox_.copy(FramePrefix(header_bytes, segments, announced).bytes());
  outbox_.add(header_bytes, header.keep);
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    if (announced[i] == 0) {
      outbox_.add({segment.data, segment.size}, segment.keep);
      continue;
    }
    outbox_.copy(std::as_bytes(std::span(&announced[i], 1)));
    apart_.push_back({segment, queued_ + outbox_.size() - before});
    bytes += segment.size;
  }
  queued_ += outbox_.size() - before;
  unsent_.fetch_add(bytes + outbox_.size() - before, std::memory_order_relaxed);
}

void UcxChannel::close() {
  Released released;
  MutexLock lock(mutex_);
  if (ended_ || closing_) return;
  closing_ = true;
  const auto goodbye = goodbye_frame();
  outbox_.copy(goodbye);
  queued_ += goodbye.size();
  unsent_.fetch_add(goodbye.size(), std::memory_order_relaxed);
  flush_locked(false, released);
  request_queue_->post_review(options_.token);
}

void UcxChannel::open(UcxWorker& worker, std::shared_ptr<UcxRoute> route, std::uint64_t peer_label) {
  Released released;
  MutexLock lock(mutex_);
  if (ended_) return;
  opened_.store(true, std::memory_order_release);
  worker_ = &worker;
  route_ = std::move(route);
  peer_label_ = peer_label;
  flush_locked(true, released);
}

void UcxChannel::flush() {
  Released released;
  MutexLock lock(mutex_);
  flush_locked(true, released);
}

/// Whether UCX could accept more now; only the limit per call held it back.
bool UcxChannel::more_to_send() const {
  return (next_chunk_ || !outbox_.empty()) && chunks_under_way_ < kMostChunksUnderWay && may_go_on();
}

bool UcxChannel::may_go_on() const { return apart_.empty() || sent_ < apart_.front().position + kUcxAhead; }

void UcxChannel::flush_locked(bool patient, Released& released) {
  if (route_ == nullptr || ended_ || broken_) return;
  try {
    // A segment that UCX sends at once lets the stream continue.
    bool goes_on = true;
    while (goes_on) goes_on = send_chunks(patient, released) && send_segments(patient, released);
  } catch (const std::exception&) {  // the stream cannot be continued
    broken_ = "no memory left to send a message";
    return request_queue_->post_review(options_.token);
  }
  // The driver continues with the rest once it wakes, and so does UCX with the tasks that it took over.
  if (patient) posted_ = false;
  if (!posted_ && (patient ? more_to_send() : !quiet())) {
    posted_ = true;
    request_queue_->post_review(options_.token);
  }
}

void UcxChannel::prepare_chunk(Released& released) {
  next_chunk_ = std::make_unique<UcxTask>();
  next_chunk_->kind = UcxTask::Kind::kChunk;
  next_chunk_->label = {peer_label_, chunks_++};
  next_chunk_->channel = shared_from_this();
  next_chunk_->link = options_.token;
  Bytes& chunk = next_chunk_->chunk;
  chunk.reserve(std::min(outbox_.size(), kUcxChunkBytes));
  std::array<iovec, kUcxIovecs> places;
  while (!outbox_.empty() && chunk.size() < kUcxChunkBytes) {
    const std::size_t count = outbox_.front(places);
    std::size_t taken = 0;
    for (const iovec& place : std::span(places).first(count)) {
      const auto* const bytes = static_cast<const std::byte*>(place.iov_base);
      const std::size_t size = std::min(place.iov_len, kUcxChunkBytes - chunk.size());
      chunk.insert(chunk.end(), bytes, bytes + size);
      taken += size;
    }
    outbox_.consume(taken, released);
  }
}

bool UcxChannel::send_chunks(bool patient, Released& released) {
  const std::uint64_t limit = sent_ + kMostAtOnce;
  while (chunks_under_way_ < kMostChunksUnderWay && sent_ < limit && may_go_on() &&
         (next_chunk_ || !outbox_.empty())) {
    if (!next_chunk_) prepare_chunk(released);
    const std::size_t size = next_chunk_->chunk.size();
    switch (worker_->send(*route_, next_chunk_, patient)) {
      case UcxWorker::Outcome::kBusy:
      case UcxWorker::Outcome::kFailed:
        return false;
      case UcxWorker::Outcome::kDone:
        next_chunk_.reset();
        break;
      case UcxWorker::Outcome::kUnderWay:
        ++under_way_;
        ++chunks_under_way_;
        break;
    }
    sent_ += size;
    unsent_.fetch_sub(size, std::memory_order_relaxed);
  }
  return true;
}

/// Returns false if there is nothing more to do for now.
bool UcxChannel::send_segments(bool patient, Released& released) {
  bool freed = false;
  while (offered_ < apart_.size() && offered_ < kUcxSegmentsUnderWay && offered_bytes_ < kMostOffered &&
         apart_[offered_].position <= sent_) {
    const std::size_t size = apart_[offered_].segment.size;
    auto task = std::make_unique<UcxTask>();
    task->kind = UcxTask::Kind::kSegment;
    task->label = {peer_label_, first_apart_ + offered_};
    task->segment = apart_[offered_].segment;
    task->channel = shared_from_this();
    task->link = options_.token;
    const UcxWorker::Outcome outcome = worker_->send(*route_, task, patient);
    if (outcome != UcxWorker::Outcome::kUnderWay && outcome != UcxWorker::Outcome::kDone) return false;
    if (outcome == UcxWorker::Outcome::kUnderWay) ++under_way_;
    unsent_.fetch_sub(size, std::memory_order_relaxed);
    offered_bytes_ += size;
    released.push_back(std::move(apart_[offered_++].segment.keep));
    if (outcome == UcxWorker::Outcome::kUnderWay) continue;
    released.push_back(std::move(task->segment.keep));
    segment_done(first_apart_ + offered_ - 1);
    freed = true;
  }
  return freed;
}

void UcxChannel::segment_done(std::uint64_t number) {
  if (number < first_apart_ || number - first_apart_ >= apart_.size()) return;
  Apart& segment = apart_[number - first_apart_];
  segment.done = true;
  offered_bytes_ -= segment.segment.size;
  while (!apart_.empty() && apart_.front().done) {
    apart_.pop_front();
    ++first_apart_;
    --offered_;
  }
}

void UcxChannel::finished(const UcxTask& task) {
  Released released;
  MutexLock lock(mutex_);
  --under_way_;
  const bool is_chunk = task.kind == UcxTask::Kind::kChunk;
  if (is_chunk) --chunks_under_way_;
  if (ended_) return;
  if (task.status != UCS_OK) {
    if (!broken_) broken_ = "UCX could not send";
    return;
  }
  if (!is_chunk) segment_done(task.label.number);
  flush_locked(true, released);
}

bool UcxChannel::quiet() const {
  return under_way_ == 0 && (broken_ || (outbox_.empty() && !next_chunk_ && apart_.empty()));
}

UcxChannel::State UcxChannel::state() const {
  MutexLock lock(mutex_);
  return {.closing = closing_, .quiet = quiet(), .broken = broken_};
}

void UcxChannel::break_off(const std::string& why) {
  MutexLock lock(mutex_);
  if (!broken_) broken_ = why;
}

void UcxChannel::end(const Error& reason) {
  Released released;
  UcxTaskPtr chunk;
  MutexLock lock(mutex_);
  ended_ = reason.message();
  drop_all(released);
  chunk = std::move(next_chunk_);
  route_.reset();
  worker_ = nullptr;
}

void UcxChannel::drop_all(Released& released) {
  outbox_.clear(released);
  for (Apart& segment : apart_) released.push_back(std::move(segment.segment.keep));
  apart_.clear();
  offered_ = 0;
  unsent_.store(0, std::memory_order_relaxed);
}

void UcxChannel::throw_ended() const { throw nothing_can_be_sent(options_.peer, ended_ ? ended_ : broken_); }

}  // namespace torchspan::net
