#include "net/local/shared_lane.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <sys/socket.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

/// Descriptors that wait for the note that announces them.
constexpr std::size_t kMostWaiting = 64;

}  // namespace

bool send_note(int socket, BytesView bytes, int descriptor) {
  return send_with_descriptor(socket, bytes, descriptor, MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

ReceivedControl receive_notes(int socket, std::span<std::byte> bytes, std::deque<Descriptor>& descriptors,
                              const LocalFaults& faults) {
  ReceivedBytes received = receive_with_descriptors(socket, bytes, MSG_DONTWAIT);
  if (received.size < 0) return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  if (received.size == 0) return {.ended = true};
  ReceivedControl received_notes{.size = static_cast<std::size_t>(received.size),
                                 .truncated = received.truncated};
  for (Descriptor& descriptor : received.descriptors) {
    if (fails(faults, LocalStep::kTakeDescriptor)) {
      received_notes.truncated = true;
    } else {
      descriptors.push_back(std::move(descriptor));
    }
  }
  return received_notes;
}

void ControlParser::feed(BytesView bytes, bool truncated, std::deque<ControlMessage>& notes) {
  truncated_ |= truncated;
  partial_.insert(partial_.end(), bytes.begin(), bytes.end());
  std::size_t at = 0;
  while (at < partial_.size()) {
    const auto kind = static_cast<ControlMessage::Kind>(partial_[at]);
    if (kind == ControlMessage::Kind::kWake) {
      ++at;
      continue;
    }
    if (kind != ControlMessage::Kind::kBlock && kind != ControlMessage::Kind::kRetired) {
      throw_invalid("sent a note of an unknown type");
    }
    if (partial_.size() - at < kNoteBytes) break;
    ByteReader reader(BytesView(partial_).subspan(at + 8, kNoteBytes - 8));
    ControlMessage note{.kind = kind};
    note.number = reader.get<std::uint64_t>();
    note.size = reader.get<std::uint64_t>();
    at += kNoteBytes;
    if (kind == ControlMessage::Kind::kBlock) {
      if (descriptors_.empty() && truncated_) {
        throw Error(ErrorKind::kOverloaded,
                    "passed memory, but this process has no descriptor left for it: raise the limit of open "
                    "files (ulimit -n)");
      }
      if (descriptors_.empty()) throw_invalid("announced memory that it did not pass");
      note.descriptor = std::move(descriptors_.front());
      descriptors_.pop_front();
    }
    notes.push_back(std::move(note));
  }
  partial_.erase(partial_.begin(), partial_.begin() + static_cast<std::ptrdiff_t>(at));
  if (descriptors_.size() > kMostWaiting) {
    throw_invalid("passed descriptors that were not requested");
  }
}

namespace {

constexpr std::uint32_t kRecordMagic = 0x4c505354;
constexpr std::size_t kNotesAtOnce = 4096;
constexpr int kReadsAtOnce = 16;

}  // namespace

SharedLane::SharedLane(std::shared_ptr<LocalShare> share, const TransportOptions& options, Role role)
    : share_(std::move(share)),
      role_(role),
      peer_blocks_(share_, options),
      pool_(std::make_shared<BlockPool>(share_, static_cast<BlockNotes&>(*this))) {
  share_->add_pool(pool_);
}

SharedLane::~SharedLane() { pool_->close(); }

void SharedLane::begin(int socket) {
  socket_ = socket;
  if (role_ == Role::kListener) return;
  make_ring();
  send_record();
}

void SharedLane::make_ring() {
  const std::size_t bytes = share_->options.ring_bytes;
  auto made = make_memory(share_->faults, kRingHeaderBytes + bytes);
  if (!made) return;
  draw_nonce(nonce_);
  new (made->memory.data())
      RingHeader{.nonce = nonce_, .tail = 0, .head = 0, .consumer_sleeps = 0, .producer_waits = 0};
  outgoing_.emplace(std::move(made->memory));
  offered_ = std::move(made->descriptor);
}

void SharedLane::take_ring(const Record& record) {
  std::deque<Descriptor>& descriptors = parser_.descriptors();
  if (!record.offers || descriptors.size() != 1 || !is_ring_size(record.ring_bytes)) return;
  const Descriptor descriptor = std::move(descriptors.front());
  descriptors.clear();
  try {
    incoming_.emplace(map_memory(share_->faults, descriptor, kRingHeaderBytes + record.ring_bytes));
  } catch (const Error&) {
    // The sides then use the socket.
  }
}

void SharedLane::send_record() {
  Record record{.offers = offered_.get() >= 0,
                .accepts = incoming_.has_value(),
                .ring_bytes = share_->options.ring_bytes,
                .nonce = {}};
  if (record.accepts) record.nonce = incoming_->header().nonce;
  const auto send = [&] {
    ByteWriter writer;
    writer.put(kRecordMagic);
    writer.put(static_cast<std::uint8_t>(record.offers));
    writer.put(static_cast<std::uint8_t>(record.accepts));
    writer.put(std::uint16_t{0});
    writer.put(record.ring_bytes);
    writer.put_bytes(record.nonce);
    const bool refuses = record.offers && fails(share_->faults, LocalStep::kPassDescriptor);
    return !refuses && send_note(socket_, writer.bytes(), record.offers ? offered_.get() : -1);
  };
  bool sent = send();
  if (!sent && record.offers) {
    // The system passes no descriptor, so the sides use the socket.
    record.offers = record.accepts = false;
    sent = send();
  }
  if (!sent) throw Error(ErrorKind::kDisconnected, "disconnected during the handshake");
  passed_ |= record.offers;
  offered_.reset();
  ++records_sent_;
  if (!record.accepts) incoming_.reset();
}

std::optional<SharedLane::Record> SharedLane::receive_record() {
  std::array<std::byte, kRecordBytes> bytes;
  const ReceivedControl received_notes = receive_notes(
      socket_, std::span(bytes).first(kRecordBytes - record_.size()), parser_.descriptors(), share_->faults);
  if (received_notes.ended) {
    throw Error(ErrorKind::kDisconnected, "disconnected during the handshake: see its log for the reason");
  }
  record_.insert(record_.end(), bytes.begin(),
                 bytes.begin() + static_cast<std::ptrdiff_t>(received_notes.size));
  if (record_.size() < kRecordBytes) return std::nullopt;
  ByteReader reader(record_);
  Record record;
  const auto magic = reader.get<std::uint32_t>();
  record.offers = reader.get<bool>();
  record.accepts = reader.get<bool>();
  const auto zero = reader.get<std::uint16_t>();
  record.ring_bytes = reader.get<std::uint64_t>();
  std::ranges::copy(reader.get_bytes(kNonceBytes), record.nonce.begin());
  record_.clear();
  if (magic != kRecordMagic || zero != 0) {
    throw_invalid("broke the handshake: it sent no offer to share memory");
  }
  return record;
}

bool SharedLane::proves(const Record& record) const {
  return record.accepts && passed_ && record.nonce == nonce_;
}

Lane::Outcome SharedLane::settle() {
  const auto record = receive_record();
  return record ? take_record(*record) : Outcome::kUnsettled;
}

Lane::Outcome SharedLane::take_record(const Record& record) {
  if (role_ == Role::kListener && records_sent_ == 0) {
    take_ring(record);
    if (incoming_) make_ring();
    if (!outgoing_) incoming_.reset();
    send_record();
    return passed_ && incoming_ ? Outcome::kUnsettled : Outcome::kDeclined;
  }
  if (role_ == Role::kListener) {
    // The peer would write to a ring that this side does not read.
    if (record.accepts && !proves(record)) {
      throw_invalid("accepted shared memory, but cannot read the nonce in it");
    }
    return record.accepts ? Outcome::kOpen : Outcome::kDeclined;
  }
  // The listener's refusal is final for both sides.
  if (!record.offers || !record.accepts) return Outcome::kDeclined;
  if (proves(record)) take_ring(record);
  send_record();
  return incoming_ ? Outcome::kOpen : Outcome::kDeclined;
}

bool SharedLane::read_some_notes() {
  std::array<std::byte, kNotesAtOnce> bytes;
  const ReceivedControl received_notes = receive_notes(socket_, bytes, parser_.descriptors(), share_->faults);
  ended_ |= received_notes.ended;
  if (received_notes.size == 0) return false;
  parser_.feed(std::span(bytes).first(received_notes.size), received_notes.truncated, notes_);
  for (ControlMessage& note : notes_) {
    if (note.kind == ControlMessage::Kind::kBlock) peer_blocks_.add(note.number, note.size, note.descriptor);
    if (note.kind == ControlMessage::Kind::kRetired) peer_blocks_.retire(note.number);
  }
  notes_.clear();
  return true;
}

bool SharedLane::read_notes() {
  for (int i = 0; i < kReadsAtOnce && read_some_notes(); ++i) {
  }
  return ended_;
}

BytesView SharedLane::readable() {
  if (broken_.load(std::memory_order_acquire)) {
    throw_invalid("reports more bytes read than were written");
  }
  return incoming_->readable();
}

void SharedLane::consume(std::size_t size) {
  if (incoming_->consume(size)) wake_peer();
}

Buffer SharedLane::adopt(std::uint64_t block, std::size_t size) {
  // The peer sent the note of a block before the frame that lends it.
  while (!peer_blocks_.has(block) && read_some_notes()) {
  }
  return peer_blocks_.adopt(block, size);
}

bool SharedLane::prepare_sleep(bool unsent) {
  const bool nothing_arrived = incoming_->ask_for_bytes();
  const bool no_room = !unsent || outgoing_->ask_for_room();
  return nothing_arrived && no_room;
}

void SharedLane::end_sleep() {
  incoming_->stop_asking();
  outgoing_->stop_asking();
}

ssize_t SharedLane::write(std::span<const iovec> places) {
  try {
    const std::size_t written = outgoing_->write(places);
    if (written != 0 && outgoing_->consumer_wants_wake()) wake_peer();
    return static_cast<ssize_t>(written);
  } catch (const Error&) {
    broken_.store(true, std::memory_order_release);
    return -1;
  }
}

void SharedLane::wake_peer() {
  // If this fails, the socket is full of unread bytes, which wake the peer as well, or the peer has ended.
  const std::byte wake{static_cast<std::uint8_t>(ControlMessage::Kind::kWake)};
  send_note(socket_, {&wake, 1}, -1);
}

bool SharedLane::pass(std::uint64_t block, std::size_t size, const Descriptor& descriptor) {
  if (fails(share_->faults, LocalStep::kPassDescriptor)) return false;
  ByteWriter note;
  note.put(ControlMessage::Kind::kBlock);
  note.put_bytes(std::array<std::byte, 7>{});
  note.put(block);
  note.put(std::uint64_t{size});
  return send_note(socket_, note.bytes(), descriptor.get());
}

bool SharedLane::retire(std::uint64_t block) {
  ByteWriter note;
  note.put(ControlMessage::Kind::kRetired);
  note.put_bytes(std::array<std::byte, 7>{});
  note.put(block);
  note.put(std::uint64_t{0});
  return send_note(socket_, note.bytes(), -1);
}

}  // namespace torchspan::net
