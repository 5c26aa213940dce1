#include <algorithm>
#include <cstdlib>
#include <sys/socket.h>

#include "net/local/shared_lane.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

constexpr std::size_t kRing = 4096;

struct Pair {
  Pair() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) std::abort();
    ours.reset(ends[0]);
    theirs.reset(ends[1]);
  }
  Descriptor ours, theirs;
};

/// Sends `bytes`, with the descriptor of a new ring if `with_ring` is set.
void say(const Pair& pair, BytesView bytes, bool with_ring) {
  const auto made = with_ring ? make_memory({}, kRingHeaderBytes + kRing) : std::nullopt;
  if (!bytes.empty()) send_note(pair.theirs.get(), bytes, made ? made->descriptor.get() : -1);
}

void use(SharedLane& lane) {
  lane.read_notes();
  const BytesView bytes = lane.readable();
  lane.consume(bytes.size());
  const Bytes text(64);
  const iovec place{const_cast<std::byte*>(text.data()), text.size()};
  lane.write({&place, 1});
  lane.prepare_sleep(true);
  lane.end_sleep();
}

/// Returns the nonce in the ring that the lane passed, or zeros.
std::array<std::byte, kNonceBytes> nonce_passed(const Pair& pair) {
  std::array<std::byte, 4096> bytes;
  std::deque<Descriptor> descriptors;
  receive_notes(pair.theirs.get(), bytes, descriptors, {});
  if (descriptors.empty()) return {};
  return RingConsumer(map_memory({}, descriptors.front(), kRingHeaderBytes + kRing)).header().nonce;
}

}  // namespace

/// An authenticated peer negotiates shared memory with the bytes of the input. Each part follows a byte that
/// gives its length, whether a ring comes with it, and whether it contains the nonce of this side's ring.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  LocalOptions options{.ring_bytes = kRing, .pool_bytes = 64 << 10};
  const auto share = std::make_shared<LocalShare>(options);
  Pair pair;
  SharedLane lane(share, {}, (data[0] & 1) != 0 ? Role::kDialer : Role::kListener);
  BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  try {
    lane.begin(pair.ours.get());
    Lane::Outcome outcome = Lane::Outcome::kUnsettled;
    while (!bytes.empty() && outcome != Lane::Outcome::kDeclined) {
      const auto how = static_cast<unsigned>(bytes[0]);
      bytes = bytes.subspan(1);
      Bytes part(bytes.begin(),
                 bytes.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(how & 63, bytes.size())));
      bytes = bytes.subspan(part.size());
      if ((how & 128) != 0 && part.size() >= 16 + kNonceBytes) {
        std::ranges::copy(nonce_passed(pair), part.begin() + 16);
      }
      say(pair, part, (how & 64) != 0);
      if (outcome == Lane::Outcome::kUnsettled) outcome = lane.settle();
      if (outcome == Lane::Outcome::kOpen) use(lane);
    }
    pair.theirs.reset();
    if (outcome == Lane::Outcome::kUnsettled) lane.settle();
    if (outcome == Lane::Outcome::kOpen) use(lane);
  } catch (const Error&) {
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return ::testing::offer_seeds(count, arguments, [] {
    const auto record = [](bool offers, bool accepts) {
      ByteWriter writer;
      writer.put(std::uint32_t{0x4c505354});
      writer.put(static_cast<std::uint8_t>(offers));
      writer.put(static_cast<std::uint8_t>(accepts));
      writer.put(std::uint16_t{0});
      writer.put(std::uint64_t{kRing});
      writer.put_bytes(Bytes(kNonceBytes));
      return writer.take();
    };
    const auto part = [](int how, BytesView bytes) {
      return ::testing::joined({::testing::bytes_of({how | static_cast<int>(bytes.size())}), bytes});
    };
    ByteWriter block;
    block.put(ControlMessage::Kind::kBlock);
    block.put_bytes(Bytes(7));
    block.put(std::uint64_t{1});
    block.put(std::uint64_t{kRingHeaderBytes + kRing});
    std::vector<Bytes> seeds;
    // A dialing peer sends its offer, then its acceptance; a listening peer sends both in one record.
    seeds.push_back(::testing::joined({::testing::bytes_of({0}), part(64, record(true, false)),
                                       part(128, record(false, true)), part(0, ::testing::bytes_of({1, 1})),
                                       part(64, block.bytes())}));
    seeds.push_back(::testing::joined(
        {::testing::bytes_of({0}), part(64, record(true, false)), part(0, record(false, false))}));
    seeds.push_back(::testing::joined({::testing::bytes_of({0}), part(0, record(false, false))}));
    seeds.push_back(::testing::joined({::testing::bytes_of({1}), part(192, record(true, true)),
                                       part(0, ::testing::bytes_of({1})), part(64, block.bytes())}));
    seeds.push_back(::testing::joined({::testing::bytes_of({1}), part(0, record(false, false))}));
    return seeds;
  });
}
