#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "net/framing.h"
#include "net/tls/hello.h"
#include "net/tls/pieces.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

constexpr FrameLimits kLimits{1 << 12, 3 << 20, 1 << 6};

/// A channel's receiving half with its first lane and one more. Returns false when the channel must end.
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

/// Any bytes on two lanes, alternating as the input says, give messages or a rejection; any greeting is
/// decoded or rejected.
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

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    const auto on_lane = [](int lane, BytesView bytes) {
      Bytes all;
      for (std::size_t at = 0; at < bytes.size(); at += 128) {
        const BytesView part = bytes.subspan(at, std::min<std::size_t>(128, bytes.size() - at));
        all.push_back(static_cast<std::byte>(((part.size() - 1) << 1) | static_cast<unsigned>(lane)));
        all.insert(all.end(), part.begin(), part.end());
      }
      return all;
    };
    const Bytes text(300, std::byte{'t'});
    const std::vector<Segment> segments = {
        {text.data(), 200, nullptr}, {text.data(), 0, nullptr}, {text.data(), 100, nullptr}};
    const Bytes striped = joined({FramePrefix(text, segments, FrameType::kStriped).bytes(), text});
    const Bytes whole = joined({FramePrefix(text, {}).bytes(), text});
    const Bytes piece = joined({piece_prefix(0, 0), text}), second = joined({piece_prefix(1, 0), text});
    LaneHello hello{.lanes = 2, .lane = 1};
    std::vector<Bytes> seeds = {encode(hello), encode(LaneHello{})};
    seeds.push_back(joined({on_lane(0, striped), on_lane(1, piece), on_lane(0, whole)}));
    seeds.push_back(joined({on_lane(0, striped), on_lane(0, whole), on_lane(0, striped), on_lane(1, piece),
                            on_lane(1, second)}));
    seeds.push_back(joined({on_lane(1, BytesView(piece).first(20)), on_lane(0, striped),
                            on_lane(1, BytesView(piece).subspan(20))}));
    seeds.push_back(joined({on_lane(0, heartbeat_frame()), on_lane(0, whole), on_lane(0, goodbye_frame())}));
    return seeds;
  });
}
