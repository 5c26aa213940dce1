#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <torchspan/detail/net/transport.h>

#include "net/framing.h"

namespace torchspan::net {

/// The layout of messages on UCX. Active messages of type 0 are hellos, which prove that the route works.
/// Then each side of a channel sends a stream of frames (framing.h) in chunks: active messages of type 1,
/// whose header is a UcxLabel with the chunk's number, from 0 on. The sender may leave a large segment out of
/// the frame: like a lent segment it has a UcxAnnouncement there, and arrives by rendezvous as an active message of
/// type 2. One active message may overtake another.
struct UcxLabel {
  std::uint64_t channel;  ///< the label in the receiver's greeting
  std::uint64_t number;   ///< of the chunk, or of the segment
};

/// What a frame says of a segment that is not in it: a u64 with the segment's number, from 1 on, in the lower 40 bits,
/// and above them Segment::device_target; 0 unless both sides carry device memory.
struct UcxAnnouncement {
  static constexpr int kNumberBits = 40;  // a petabyte of the smallest segments
  static_assert(kDeviceTargets == 1u << (64 - kNumberBits));
  std::uint64_t number = 0;
  std::uint32_t device_target = 0;
  std::uint64_t word() const { return number | std::uint64_t{device_target} << kNumberBits; }
  static UcxAnnouncement of(std::uint64_t word) {
    return {word & ((std::uint64_t{1} << kNumberBits) - 1), static_cast<std::uint32_t>(word >> kNumberBits)};
  }
};

inline constexpr std::size_t kUcxChunkBytes = 32 << 10;
/// The most segments that a sender offers before the receiver has fetched the first of them, and the most
/// bytes of the stream that it sends past a segment that was not fetched. They bound what the receiver must
/// hold.
inline constexpr std::size_t kUcxSegmentsUnderWay = 64;
inline constexpr std::uint64_t kUcxAhead = 16 << 20;

/// A segment that waits at the peer until it is fetched, or that came with the offer.
struct UcxOffer {
  std::uint64_t size = 0;
  void* descriptor = nullptr;  ///< of UCX, to fetch it; null if `bytes` has arrived
  Bytes bytes = {};
};

/// The receiving half of a channel over UCX: puts chunks and segments back in order, and checks all numbers
/// of the peer before it allocates memory. Does not call UCX. For the driver; after a throw the channel must
/// end with that Error.
class UcxInbox {
 public:
  /// Returns Handler::device_memory().
  using DeviceAllocator = std::function<Buffer(std::uint32_t target, std::size_t size)>;
  /// `device_memory`: null if the channel does not carry device memory.
  explicit UcxInbox(const TransportOptions& options, DeviceAllocator device_memory = nullptr);
  UcxInbox(const UcxInbox&) = delete;
  UcxInbox& operator=(const UcxInbox&) = delete;

  void add_chunk(std::uint64_t number, Bytes bytes);
  /// Takes over the offer, unless it throws.
  void add_offer(std::uint64_t number, UcxOffer offer);

  struct Fetch {
    std::uint64_t number;
    void* descriptor;
    Buffer into;
  };
  /// A segment that a frame announced and whose offer arrived, with the memory to receive it into: on a device only if
  /// UCX fetches it.
  std::optional<Fetch> next_fetch();
  void fetched(std::uint64_t number);
  /// Appends the complete messages, in order.
  void take(std::vector<Message>& messages);
  /// The peer said goodbye, and all messages before it were taken.
  bool goodbye() const { return parser_.goodbye() && pending_.empty(); }
  /// The channel ends: returns the descriptors of UCX that were not fetched.
  std::vector<void*> abandon();

 private:
  struct Awaited {
    std::uint64_t size;
    std::uint32_t device_target = 0;
    Buffer buffer = {};
    bool done = false;
  };
  struct Pending {
    Message message;
    std::vector<std::pair<std::size_t, std::uint64_t>> missing;  ///< segments and their numbers, last first
    std::uint64_t bytes;                                         ///< of its frame
  };
  Buffer announce(UcxAnnouncement announcement, std::size_t size);
  Buffer allocate(const Awaited& awaited) const;
  void match(std::uint64_t number);
  /// The first segment that was not received.
  std::uint64_t first_missing();
  void parse(BytesView bytes);
  void add_pending(Message message);

  const BufferAllocator allocator_;
  const DeviceAllocator device_memory_;
  FrameParser parser_;
  std::uint64_t next_chunk_ = 0;
  std::map<std::uint64_t, Bytes> early_chunks_;
  std::uint64_t announced_ = 1;  ///< the next segment that a frame announces
  std::uint64_t missing_ = 1;    ///< at most first_missing()
  std::uint64_t assigned_ = 1;   ///< the next announced segment whose frame is not complete
  std::map<std::uint64_t, Awaited> awaited_;
  std::map<std::uint64_t, UcxOffer> offers_;
  std::deque<std::uint64_t> ready_;  ///< awaited and offered
  std::deque<Pending> pending_;
  std::uint64_t held_ = 0;  ///< bytes of frames in pending_ behind the first
};

}  // namespace torchspan::net
