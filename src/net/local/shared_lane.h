#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <torchspan/core/bytes.h>

#include "core/api/descriptor.h"
#include "net/local/block_pool.h"
#include "net/local/ring.h"
#include "net/stream/lane.h"

namespace torchspan::net {

/// Notes on the socket of two local transports while frames use the rings. Fixed sizes, little-endian:
///
///   wake     u8 1                                   the ring has news
///   block    u8 2  u8 0[7]  u64 number  u64 bytes   with the descriptor of its memory
///   retired  u8 3  u8 0[7]  u64 number  u64 0       the block is not used any longer
struct ControlMessage {
  enum class Kind : std::uint8_t { kWake = 1, kBlock = 2, kRetired = 3 };
  Kind kind;
  std::uint64_t number = 0;
  std::uint64_t size = 0;
  Descriptor descriptor = {};
};
inline constexpr std::size_t kNoteBytes = 24;

/// Sends all bytes in one call, with `descriptor` unless that is -1. Returns false if they were not sent: no
/// room, no connection, or the system passes no more descriptors.
bool send_note(int socket, BytesView bytes, int descriptor);

/// Bytes and descriptors from a socket.
struct ReceivedControl {
  std::size_t size = 0;
  bool ended = false;      ///< end of stream, or the connection broke
  bool truncated = false;  ///< a descriptor was lost: this process may have no more
};
/// Receives into `bytes` without waiting and appends the descriptors to `descriptors`.
ReceivedControl receive_notes(int socket, std::span<std::byte> bytes, std::deque<Descriptor>& descriptors,
                              const LocalFaults& faults);

/// Turns bytes and descriptors into notes; pure. After a throw it must not be used again.
class ControlParser {
 public:
  /// Throws kInvalid for bytes that are not a note and for a block without its descriptor, kOverloaded if the
  /// descriptor was lost (`truncated`).
  void feed(BytesView bytes, bool truncated, std::deque<ControlMessage>& notes);
  std::deque<Descriptor>& descriptors() { return descriptors_; }

 private:
  Bytes partial_;
  std::deque<Descriptor> descriptors_;
  bool truncated_ = false;
};

/// A ring for each direction, and the blocks that are lent through them. After the handshake, the sides
/// negotiate on the socket:
///
///   record   u32 0x4c505354  u8 offers  u8 accepts  u16 0  u64 bytes of the ring  u8 nonce[32]
///
/// dialer → its offer, listener → its offer and acceptance, dialer → its acceptance. The first refusal is the
/// last record; frames then follow on the socket. An offer passes the descriptor of the ring that its sender
/// will write. An acceptance holds the nonce from the other side's ring, which proves that both share the
/// memory, and so the host. A dialer that gets back a wrong nonce refuses; for a listener a wrong nonce is an
/// error.
class SharedLane final : public Lane, private BlockNotes {
 public:
  SharedLane(std::shared_ptr<LocalShare> share, const TransportOptions& options, Role role);
  ~SharedLane() override;

  void begin(int socket) override;
  Outcome settle() override;
  bool read_notes() override;
  BytesView readable() override;
  void consume(std::size_t size) override;
  std::size_t capacity() const override { return incoming_->capacity(); }
  Buffer adopt(std::uint64_t block, std::size_t size) override;
  bool prepare_sleep(bool unsent) override;
  void end_sleep() override;
  Deadline tidy(TimePoint now) override { return pool_->tidy(now); }
  ssize_t write(std::span<const iovec> places) override;
  std::size_t lend_from() const override { return share_->options.lend_from; }
  std::shared_ptr<Lender> lender() const override { return pool_; }

 private:
  static constexpr std::size_t kRecordBytes = 48;
  struct Record {
    bool offers;
    bool accepts;
    std::uint64_t ring_bytes;
    std::array<std::byte, kNonceBytes> nonce;
  };

  bool pass(std::uint64_t block, std::size_t size, const Descriptor& descriptor) override;
  bool retire(std::uint64_t block) override;

  void make_ring();
  void take_ring(const Record& record);
  void send_record();
  std::optional<Record> receive_record();
  Outcome take_record(const Record& record);
  bool proves(const Record& record) const;
  /// Reads once; returns false if there was nothing to read.
  bool read_some_notes();
  void wake_peer();

  const std::shared_ptr<LocalShare> share_;
  const Role role_;
  int socket_ = -1;
  std::optional<RingProducer> outgoing_;
  std::optional<RingConsumer> incoming_;
  Descriptor offered_;  ///< descriptor of the outgoing ring, until it is passed
  std::array<std::byte, kNonceBytes> nonce_{};
  bool passed_ = false;  ///< the descriptor of the outgoing ring was passed
  Bytes record_;         ///< the record that is being received
  ControlParser parser_;
  std::deque<ControlMessage> notes_;
  std::size_t records_sent_ = 0;
  bool ended_ = false;
  std::atomic<bool> broken_{false};  ///< the peer's counters are impossible
  PeerBlocks peer_blocks_;
  std::shared_ptr<BlockPool> pool_;
};

}  // namespace torchspan::net
