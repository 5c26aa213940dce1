#pragma once
#include <cstdint>
#include <optional>

#include <torchspan/core/bytes.h>

namespace torchspan::launch {

/// The header of a message between the launchers of two hosts. An answer of the same version is accompanied by a
/// HostReport.
struct HostMessage {
  static constexpr std::uint32_t kVersion = 1;
  enum class Kind : std::uint8_t { kQuestion = 1, kAnswer = 2 };

  std::uint32_t version = kVersion;
  Kind kind = Kind::kQuestion;
  std::uint64_t id = 0;  ///< a number of the asking launcher; the answer repeats it
  bool brief = false;    ///< without the workers: answered at once
};

Bytes encode_host_message(const HostMessage& message);
/// Returns nullopt for bytes that are no header. Of another version, only `version`, `kind` and `id` are read, which no
/// version changes. Pure; accepts any bytes.
std::optional<HostMessage> decode_host_message(BytesView bytes);

}  // namespace torchspan::launch
