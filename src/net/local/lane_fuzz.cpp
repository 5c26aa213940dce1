#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

#include "net/framing.h"
#include "net/local/block_pool.h"
#include "net/local/ring.h"
#include "net/local/shared_lane.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

constexpr std::size_t kRing = 4096;
constexpr std::size_t kBlock = kBlockHeaderBytes + 4096;
constexpr std::uint64_t kBlocks = 3;

SharedMemory plain_memory(std::size_t size) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return {static_cast<std::byte*>(memory), size};
}

void take_notes(BytesView bytes, PeerBlocks& peer_blocks) {
  ControlParser parser;
  std::deque<ControlMessage> notes;
  try {
    parser.feed(bytes, false, notes);
    for (const ControlMessage& note : notes) {
      if (note.kind == ControlMessage::Kind::kRetired) peer_blocks.retire(note.number);
    }
  } catch (const Error&) {
  }
}

/// Receives `bytes` through a ring, in parts of `lump` bytes, and adopts the blocks that the frames lend.
void take_ring(BytesView bytes, std::size_t lump, PeerBlocks& peer_blocks) {
  RingConsumer ring([] {
    SharedMemory memory = plain_memory(kRingHeaderBytes + kRing);
    new (memory.data()) RingHeader{};
    return memory;
  }());
  std::byte* data = reinterpret_cast<std::byte*>(&ring.header()) + kRingHeaderBytes;
  FrameParser parser({1 << 16, 1 << 20, 1 << 10}, allocate_buffer);
  parser.adopt_with([&](std::uint64_t block, std::size_t size) { return peer_blocks.adopt(block, size); });
  std::vector<Message> finished;
  std::uint64_t sum = 0;
  while (!bytes.empty()) {
    const std::size_t part = std::min(lump, bytes.size());
    const std::uint64_t tail = ring.header().tail;
    for (std::size_t i = 0; i < part; ++i) data[(tail + i) % kRing] = bytes[i];
    ring.header().tail = tail + part;
    bytes = bytes.subspan(part);
    for (BytesView some = ring.readable(); !some.empty(); some = ring.readable()) {
      parser.feed(some, finished);
      ring.consume(some.size());
    }
    for (const Message& message : finished) {
      for (const Buffer& buffer : message.segments) {
        for (std::size_t i = 0; i < buffer.size; ++i) {
          sum += static_cast<std::uint8_t>(buffer.data[i]);
          buffer.data[i] = std::byte{0};
        }
      }
    }
    if (part % 2 == 0) finished.clear();
  }
  if (sum == 1) finished.clear();
}

}  // namespace

/// Whatever a peer writes to the ring, the counters and the socket, nothing outside their memory is accessed.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const BytesView bytes = std::as_bytes(std::span(data + 2, size - 2));
  const auto share = std::make_shared<LocalShare>(LocalOptions{.pool_bytes = 64 << 10});
  PeerBlocks peer_blocks(share, {});
  for (std::uint64_t i = 1; i <= kBlocks; ++i) {
    const auto made = make_memory({}, kBlock);
    if (made) peer_blocks.add(i, kBlock, made->descriptor);
  }
  const std::size_t cut = std::min<std::size_t>(data[0] % 64, bytes.size());
  take_notes(bytes.first(cut), peer_blocks);
  try {
    take_ring(bytes.subspan(cut), 1 + 20 * data[1], peer_blocks);
  } catch (const Error&) {
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    const auto note = [](ControlMessage::Kind kind, std::uint64_t number, std::uint64_t size) {
      ByteWriter writer;
      writer.put(kind);
      writer.put_bytes(Bytes(7));
      writer.put(number);
      writer.put(size);
      return writer.take();
    };
    const auto lent = [](std::uint64_t block, std::size_t size) {
      const Segment segment{nullptr, size, nullptr};
      ByteWriter writer;
      writer.put_bytes(FramePrefix({}, {&segment, 1}, {&block, 1}).bytes());
      writer.put(block);
      return writer.take();
    };
    const Bytes text(200, std::byte{'t'});
    const Segment plain{text.data(), text.size(), nullptr};
    const Bytes frame = joined({FramePrefix(text, {&plain, 1}).bytes(), text, text});
    std::vector<Bytes> seeds;
    for (const int lump : {0, 1, 12}) {
      seeds.push_back(joined({bytes_of({0, lump}), frame, lent(1, 100), frame, lent(2, 4096)}));
      seeds.push_back(joined({bytes_of({0, lump}), lent(1, 100), lent(1, 100)}));
      seeds.push_back(joined({bytes_of({static_cast<int>(kNoteBytes) + 1, lump}), bytes_of({1}),
                              note(ControlMessage::Kind::kRetired, 1, 0), frame, lent(1, 10)}));
    }
    seeds.push_back(joined({bytes_of({static_cast<int>(kNoteBytes), 1}),
                            note(ControlMessage::Kind::kBlock, 9, kBlock), goodbye_frame()}));
    return seeds;
  });
}
