#include "net/tls/hello.h"

#include <algorithm>
#include <fmt/format.h>

#include "core/api/throw_invalid.h"

namespace torchspan::net {
namespace {
constexpr std::array<std::uint8_t, 8> kTlsMagic = {0x89, 'T', 'S', 'T', 'L', 'S', '\r', '\n'};
}  // namespace

Bytes encode(const LaneHello& hello) {
  ByteWriter writer;
  writer.put_bytes(std::as_bytes(std::span(kTlsMagic)));
  writer.put(hello.lowest);
  writer.put(hello.highest);
  writer.put(hello.lanes);
  writer.put(hello.lane);
  writer.put(std::uint16_t{0});
  writer.put(hello.features);
  writer.put_bytes(hello.token);
  return writer.take();
}

LaneHello decode_lane_hello(BytesView bytes, const std::string& peer) {
  ByteReader reader(bytes);
  const bool ours =
      std::ranges::equal(reader.get_bytes(kTlsMagic.size()), std::as_bytes(std::span(kTlsMagic)));
  LaneHello hello;
  hello.lowest = reader.get<std::uint16_t>();
  hello.highest = reader.get<std::uint16_t>();
  hello.lanes = reader.get<std::uint8_t>();
  hello.lane = reader.get<std::uint8_t>();
  const auto zero = reader.get<std::uint16_t>();
  hello.features = reader.get<std::uint64_t>();
  std::ranges::copy(reader.get_bytes(hello.token.size()), hello.token.begin());
  reader.expect_end();
  if (!ours || zero != 0 || hello.lowest > hello.highest || hello.lane > kMostLanes) {
    throw_invalid("'{}' sent a malformed greeting", peer);
  }
  return hello;
}

void check_agreement(const LaneHello& mine, const LaneHello& theirs, const std::string& peer) {
  if (theirs.highest < mine.lowest || theirs.lowest > mine.highest) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("'{}' speaks protocol version {} to {}, this side {} to {}: run the same "
                            "TorchSpan on all workers",
                            peer, theirs.lowest, theirs.highest, mine.lowest, mine.highest));
  }
  const auto network = [](const LaneHello& hello) {
    return (hello.features & kSendsUnencrypted) != 0 ? "tcp-isolated (no encryption)" : "tls (encryption)";
  };
  if (((mine.features ^ theirs.features) & kSendsUnencrypted) == 0) return;
  throw Error(ErrorKind::kDenied,
              fmt::format("'{}' uses the network {}, this side {}: set the same TORCHSPAN_NETWORK "
                          "(TlsOptions::network) on all workers",
                          peer, network(theirs), network(mine)));
}

}  // namespace torchspan::net
