#include "launch/supervisor/host_message.h"

namespace torchspan::launch {

Bytes encode_host_message(const HostMessage& message) {
  ByteWriter writer;
  writer.put(message.version);
  writer.put(static_cast<std::uint8_t>(message.kind));
  writer.put(message.id);
  writer.put(static_cast<std::uint8_t>(message.brief ? 1 : 0));
  return writer.take();
}

std::optional<HostMessage> decode_host_message(BytesView bytes) {
  constexpr std::size_t kFixed = sizeof(std::uint32_t) + sizeof(std::uint8_t) + sizeof(std::uint64_t);
  if (bytes.size() < kFixed) return std::nullopt;
  ByteReader reader(bytes);
  HostMessage message;
  message.version = reader.get<std::uint32_t>();
  const auto kind = reader.get<std::uint8_t>();
  if (kind != 1 && kind != 2) return std::nullopt;
  message.kind = static_cast<HostMessage::Kind>(kind);
  message.id = reader.get<std::uint64_t>();
  if (message.version != HostMessage::kVersion) return message;
  if (reader.left() != 1) return std::nullopt;
  const auto brief = reader.get<std::uint8_t>();
  if (brief > 1) return std::nullopt;
  message.brief = brief == 1;
  return message;
}

}  // namespace torchspan::launch
