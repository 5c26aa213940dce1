#include <cstdlib>
#include <cstring>

#include "net/ucx/greeting.h"
#include "net/ucx/inbox.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

TransportOptions limited() {
  TransportOptions options;
  options.max_header = 1 << 12;
  options.max_message = 1 << 20;
  options.max_segments = 64;
  return options;
}

/// Reads events from the input and applies them to the inbox, as a peer's active messages would.
void drive(ByteReader& reader) {
  std::size_t released = 0, offered = 0, fetched = 0;
  // Target 1 is a device with room, target 2 one without, and others were not offered.
  UcxInbox inbox(limited(), [](std::uint32_t target, std::size_t size) {
    if (target == 2) return Buffer();
    if (target != 1) throw Error(ErrorKind::kInvalid, "not offered");
    return allocate_buffer(size);
  });
  const auto go_on = [&] {
    while (const auto fetch = inbox.next_fetch()) {
      std::memset(fetch->into.data, 1, fetch->into.size);
      inbox.fetched(fetch->number);
      ++fetched;
    }
    std::vector<Message> came;
    inbox.take(came);
    for (const Message& message : came) {
      for (const Buffer& segment : message.segments) {
        if (segment.size != 0 && segment.data == nullptr) std::abort();
      }
    }
  };
  try {
    while (!reader.at_end()) {
      const auto kind = reader.get<std::uint8_t>();
      const std::uint64_t number = reader.get<std::uint16_t>();
      if (kind % 2 == 0) {
        const BytesView chunk = reader.get_bytes(reader.get<std::uint8_t>());
        inbox.add_chunk(number, {chunk.begin(), chunk.end()});
      } else {
        inbox.add_offer(number, {.size = reader.get<std::uint32_t>(), .descriptor = &released});
        ++offered;
      }
      go_on();
    }
  } catch (const Error&) {
  }
  released = inbox.abandon().size();
  if (released + fetched != offered) std::abort();
}

}  // namespace

/// The input is decoded as a note of a peer, and then delivered as a peer's active messages.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const BytesView bytes = std::as_bytes(std::span(data, size));
  try {
    decode_ucx_note(bytes, "peer");
  } catch (const torchspan::Error&) {
  }
  ByteReader reader(bytes);
  drive(reader);
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return ::testing::offer_seeds(count, arguments, [] {
    const auto chunk = [](int number, BytesView bytes) {
      return ::testing::joined({::testing::bytes_of({0, number, 0, static_cast<int>(bytes.size())}), bytes});
    };
    const auto offer = [](int number, int size) {
      return ::testing::bytes_of({1, number, 0, size, 0, 0, 0});
    };
    const Bytes text(30, std::byte{'t'});
    const std::vector<Segment> segments = {{nullptr, 200, nullptr}, {text.data(), 30, nullptr}};
    const std::uint64_t numbers[] = {1, 0};
    ByteWriter number;
    number.put(numbers[0]);
    const Bytes frame =
        ::testing::joined({FramePrefix(text, segments, numbers).bytes(), text, number.bytes(), text});
    ByteWriter announcement;
    announcement.put(UcxAnnouncement{1, 1}.word());
    const Bytes to_device =
        ::testing::joined({FramePrefix(text, segments, numbers).bytes(), text, announcement.bytes(), text});
    const BytesView start = BytesView(frame).first(20), rest = BytesView(frame).subspan(20);
    return std::vector<Bytes>{
        encode(UcxGreeting{1, 16, 7, Bytes(12)}),
        encode(UcxFarewell{}),
        ::testing::joined({chunk(0, frame), offer(1, 200)}),
        ::testing::joined({chunk(0, to_device), offer(1, 200)}),
        ::testing::joined({offer(1, 200), chunk(1, rest), chunk(0, start), chunk(2, goodbye_frame())}),
    };
  });
}
