#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "net/framing.h"
#include "net/tls/hello.h"
#include "net/tls/pieces.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

constexpr FrameLimits kLimits{1 << 12, 3 << 20, 1 << 6};

/// What a channel does with the bytes of its first lane and of one more; true when it goes on.
class Lanes {
 public:
  bool feed_frames(BytesView bytes) {
    try {
      std::vector<Message> came;
      parser_.feed(bytes, came);
      const auto striped = parser_.take_striped();
      auto next = striped.begin();
      for (std::size_t i = 0; i < came.size(); ++i) {
        if (next != striped.end() && next->index == i) {
          assembly_.expect(std::move(came[i]), next++->sizes);
        } else {
          assembly_.add(std::move(came[i]));
        }
      }
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  bool feed_pieces(BytesView bytes) {
    try {
      while (!bytes.empty() && pieces_.ready()) {
        iovec places[3];
        const std::size_t count = pieces_.targets(places);
        if (count == 0) std::abort();
        std::size_t taken = 0;
        for (std::size_t i = 0; i < count && !bytes.empty(); ++i) {
          const std::size_t size = std::min(bytes.size(), places[i].iov_len);
          std::memcpy(places[i].iov_base, bytes.data(), size);
          bytes = bytes.subspan(size);
          taken += size;
        }
        pieces_.received(taken);
      }
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  void check() {
    std::vector<Message> finished;
    assembly_.take(finished);
    std::size_t bytes = 0;
    for (const Message& message : finished) {
      for (const Buffer& buffer : message.segments) bytes += buffer.size;
    }
    if (assembly_.empty() && assembly_.held_bytes() != 0) std::abort();
    if (bytes > finished.size() * kLimits.max_message) std::abort();
  }

 private:
  FrameParser parser_{kLimits, allocate_buffer, FrameDialect::kLanes};
  Assembly assembly_{allocate_buffer};
  PieceReader pieces_{assembly_};
};

}  // namespace

/// Any bytes on two lanes, in turns as the bytes say, are messages or a refusal; any greeting is one or none.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  BytesView bytes = std::as_bytes(std::span(data, size));
  try {
    const LaneHello hello = decode_lane_hello(bytes, "peer");
    if (!std::ranges::equal(encode(hello), bytes)) std::abort();
  } catch (const Error&) {
  }
  Lanes lanes;
  for (bool alive = true; alive && bytes.size() > 1;) {
    const std::size_t part =
        std::min<std::size_t>(1 + (static_cast<std::size_t>(bytes[0]) >> 1), bytes.size() - 1);
    const BytesView piece = bytes.subspan(1, part);
    alive = (static_cast<unsigned>(bytes[0]) & 1) != 0 ? lanes.feed_pieces(piece) : lanes.feed_frames(piece);
    lanes.check();
    bytes = bytes.subspan(1 + part);
  }
  return 0;
}
