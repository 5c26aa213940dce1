#include <algorithm>
#include <fmt/format.h>

#include <torchspan/detail/core/protocol.h>

#include "core/api/throw_invalid.h"

namespace torchspan {

std::optional<Protocol> common_protocol(const ProtocolRange& one, const ProtocolRange& other) {
  const std::uint16_t version = std::min(one.newest, other.newest);
  if (!one.speaks(version) || !other.speaks(version)) return std::nullopt;
  return Protocol{version, one.features & other.features};
}

std::string describe_versions(const ProtocolRange& range) {
  return range.oldest == range.newest ? fmt::format("version {}", range.newest)
                                      : fmt::format("versions {} to {}", range.oldest, range.newest);
}

void put_range(ByteWriter& writer, const ProtocolRange& range) {
  writer.put(range.oldest);
  writer.put(range.newest);
  writer.put(range.features);
}

ProtocolRange get_range(ByteReader& reader) {
  ProtocolRange range;
  range.oldest = reader.get<std::uint16_t>();
  range.newest = reader.get<std::uint16_t>();
  range.features = reader.get<std::uint32_t>();
  if (range.oldest == 0 || range.oldest > range.newest) {
    throw_invalid("protocol versions {} to {} are not a range", range.oldest, range.newest);
  }
  return range;
}

}  // namespace torchspan
