#include <cstdlib>
#include <cstring>

#include "net/ucx/greeting.h"
#include "net/ucx/inbox.h"

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

/// Reads events from the bytes and does to the inbox what a peer's active messages would.
void drive(ByteReader& reader) {
  std::size_t released = 0, offered = 0, fetched = 0;
  UcxInbox inbox(limited());
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

/// Anything as a note of a peer, and as what it sends through UCX.
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
