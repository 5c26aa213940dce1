#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/bytes.h>

#include "checkpoint/files/boxes.h"
#include "checkpoint/files/element_type.h"

namespace torchspan::checkpoint {

using Metadata = std::map<std::string, std::string>;

/// One tensor of a safetensors file; `begin` and `end` are relative to the data, which follows the header.
struct HeaderEntry {
  std::string name;
  ElementType type = ElementType::kU8;
  Sizes shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const HeaderEntry&, const HeaderEntry&) = default;
};

/// Header of a safetensors file: a length of 8 bytes and JSON.
struct Header {
  std::vector<HeaderEntry> entries;  ///< in the order of the data
  Metadata metadata;
  std::uint64_t data_start = 0;  ///< bytes before the data

  std::uint64_t data_bytes() const { return entries.empty() ? 0 : entries.back().end; }
};

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  ///< other readers refuse more

/// Bytes of a tensor; throws Error{kInvalid} naming `what` if they do not fit into 63 bits or are no whole
/// number of bytes.
std::uint64_t byte_count(ElementType type, const Sizes& shape, const std::string& what);

/// How many bytes at the start of a file the header takes, from its first 8 bytes. Throws Error{kInvalid}
/// beginning with `what` unless they fit into the limit and into `file_bytes`.
std::uint64_t header_bytes(BytesView first_bytes, std::uint64_t file_bytes, const std::string& what);

/// Parses the header of a file of `file_bytes` bytes; `bytes` begins with the file and includes its header.
/// Throws Error{kInvalid} beginning with `what` for everything that the format forbids: duplicate names,
/// gaps, overlaps, sizes that disagree with shape and dtype, bytes after the data.
Header parse_header(BytesView bytes, std::uint64_t file_bytes, const std::string& what);

/// Assigns offsets in the order of `entries` (name, type and shape are read) and returns the header and its
/// bytes, padded with spaces so that the data starts at a multiple of `alignment`. Throws Error{kInvalid}
/// for duplicate names, text that is not UTF-8, and headers that other readers refuse.
struct EncodedHeader {
  Header header;
  Bytes bytes;
};
EncodedHeader encode_header(std::vector<HeaderEntry> entries, const Metadata& metadata,
                            std::uint64_t alignment = 8);

}  // namespace torchspan::checkpoint
