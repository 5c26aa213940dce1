#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "net/framing.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

constexpr FrameLimits kLimits{1 << 16, 1 << 20, 1 << 10};

struct Outcome {
  std::vector<Bytes> parts;  ///< headers and segments of the messages, in order
  bool failed = false;
  bool mid_frame = false;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome_of(const FrameParser& parser, const std::vector<Message>& finished, bool failed) {
  Outcome outcome{{}, failed, !failed && parser.mid_frame()};
  for (const Message& message : finished) {
    outcome.parts.push_back(message.header);
    for (const Buffer& buffer : message.segments)
      outcome.parts.emplace_back(buffer.data, buffer.data + buffer.size);
  }
  return outcome;
}

Outcome parse(BytesView bytes, std::size_t piece, bool in_place) {
  FrameParser parser(kLimits, allocate_buffer);
  std::vector<Message> finished;
  bool failed = false;
  try {
    for (std::size_t at = 0; at < bytes.size();) {
      BytesView part = bytes.subspan(at, std::min(piece, bytes.size() - at));
      at += part.size();
      iovec places[3];
      const std::size_t count = in_place ? parser.targets(places) : 0;
      std::size_t direct = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t taken = std::min(part.size(), places[i].iov_len);
        std::memcpy(places[i].iov_base, part.data(), taken);
        part = part.subspan(taken);
        direct += taken;
      }
      parser.received(direct, finished);
      parser.feed(part, finished);
    }
  } catch (const Error&) {
    failed = true;
  }
  return outcome_of(parser, finished, failed);
}

}  // namespace

/// Any bytes give the same messages or the same rejection, however they are split and whether or not they are
/// received in place.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  const Outcome whole = parse(bytes, bytes.size() + 1, false);
  if (parse(bytes, 1 + data[0], false) != whole || parse(bytes, 1 + data[0], true) != whole) std::abort();
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    std::vector<Bytes> seeds;
    const Bytes text = bytes_of({'h', 'e', 'a', 'd', 'e', 'r'});
    const Bytes body(100, std::byte{'b'});
    const std::vector<Segment> none,
        some = {{body.data(), 3, nullptr}, {body.data(), 0, nullptr}, {body.data(), 100, nullptr}};
    const Bytes small = joined({FramePrefix(text, none).bytes(), text});
    const Bytes large = joined({FramePrefix(text, some).bytes(), text, BytesView(body).first(3), body});
    for (const int cut : {0, 6, 255}) {
      seeds.push_back(joined({bytes_of({cut}), small, large, small, goodbye_frame()}));
      seeds.push_back(joined({bytes_of({cut}), large}));
    }
    const std::vector<Segment> endless = {{nullptr, ~std::size_t{0} >> 1, nullptr}};
    seeds.push_back(joined({bytes_of({1}), FramePrefix({}, endless).bytes()}));
    return seeds;
  });
}
