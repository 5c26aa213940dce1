#include "checkpoint/files/header.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <set>
#include <tuple>
#include <utility>

#include <torchspan/core/error.h>

#include "checkpoint/files/strict_json.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kHeaderDepth = 4;  // the object, an entry, its lists; one more for later versions
constexpr const char* kMetadataKey = "__metadata__";

Metadata metadata_of(const nlohmann::json& value, const std::string& what) {
  Metadata metadata;
  const std::string where = what + ": '__metadata__'";
  const JsonObject checked(value, where);
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) checked.refuse(fmt::format("the value of '{}' is not a string", key));
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

HeaderEntry header_entry_of(const std::string& name, const nlohmann::json& value, const std::string& what) {
  const std::string where = fmt::format("{}: tensor '{}'", what, name);
  const JsonObject object(value, where);
  HeaderEntry entry;
  entry.name = name;
  const std::string type = object.text("dtype");
  const std::optional<ElementType> known = element_type_named(type);
  if (!known) object.refuse(fmt::format("unknown dtype '{}'", type));
  entry.type = *known;
  entry.shape = object.sizes("shape");
  const Sizes offsets = object.sizes("data_offsets");
  if (offsets.size() != 2 || offsets[0] > offsets[1])
    object.refuse("'data_offsets' are not the two ends of a range");
  entry.begin = static_cast<std::uint64_t>(offsets[0]);
  entry.end = static_cast<std::uint64_t>(offsets[1]);
  const std::uint64_t bytes = byte_count(entry.type, entry.shape, where);
  if (entry.end - entry.begin != bytes) {
    object.refuse(fmt::format("shape {} and dtype {} need {} bytes, but 'data_offsets' span {}",
                              describe(entry.shape), type, bytes, entry.end - entry.begin));
  }
  return entry;
}

void check_gapless(const std::vector<HeaderEntry>& entries, std::uint64_t data_bytes,
                   const std::string& what) {
  std::uint64_t at = 0;
  for (const HeaderEntry& entry : entries) {
    if (entry.begin != at) {
      throw_invalid(fmt::format("{}: the data of tensor '{}' begins at {}, but the data before it ends at {}",
                                what, entry.name, entry.begin, at));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    throw_invalid(fmt::format("{}: the header describes {} bytes of data, but the file has {}{}", what, at,
                              data_bytes, at > data_bytes ? ": it is truncated" : ""));
  }
}

}  // namespace

std::uint64_t byte_count(ElementType type, const Sizes& shape, const std::string& what) {
  const std::optional<std::int64_t> count = element_count(shape);
  std::int64_t bits = 0;
  if (!count || __builtin_mul_overflow(*count, std::int64_t{bits_of(type)}, &bits))
    throw_invalid(fmt::format("{}: the shape {} is too large", what, describe(shape)));
  if (bits % 8 != 0) {
    throw_invalid(fmt::format("{}: {} elements of dtype {} are not a whole number of bytes", what, *count,
                              to_string(type)));
  }
  return static_cast<std::uint64_t>(bits) / 8;
}

std::uint64_t header_bytes(BytesView first_bytes, std::uint64_t file_bytes, const std::string& what) {
  if (file_bytes < kLengthBytes || first_bytes.size() < kLengthBytes) {
    throw_invalid(fmt::format("{}: the file has {} bytes, fewer than the length of a header", what,
                              std::min<std::uint64_t>(file_bytes, first_bytes.size())));
  }
  const auto length = ByteReader(first_bytes).get<std::uint64_t>();
  if (length > kMostHeaderBytes) {
    throw_invalid(fmt::format("{}: the header would have {} bytes; the format allows {}", what, length,
                              kMostHeaderBytes));
  }
  if (length > file_bytes - kLengthBytes) {
    throw_invalid(fmt::format("{}: the header has {} bytes, but the file only {}: it is truncated", what,
                              length, file_bytes));
  }
  return kLengthBytes + length;
}

Header parse_header(BytesView bytes, std::uint64_t file_bytes, const std::string& what) {
  Header header;
  header.data_start = header_bytes(bytes, file_bytes, what);
  if (bytes.size() < header.data_start) throw_invalid(fmt::format("{}: the header is cut off", what));
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  const std::string_view json(text, header.data_start - kLengthBytes);
  if (json.empty() || json.front() != '{') throw_invalid(fmt::format("{}: no safetensors header", what));
  const nlohmann::json root = parse_strictly(json, kHeaderDepth, what);
  for (const auto& [name, value] : root.items()) {
    if (name == kMetadataKey) {
      header.metadata = metadata_of(value, what);
    } else {
      header.entries.push_back(header_entry_of(name, value, what));
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_gapless(header.entries, file_bytes - header.data_start, what);
  return header;
}

EncodedHeader encode_header(std::vector<HeaderEntry> entries, const Metadata& metadata,
                            std::uint64_t alignment) {
  const std::string what = "a safetensors file";
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!metadata.empty()) root[kMetadataKey] = metadata;
  std::set<std::string_view> names;
  std::uint64_t at = 0;
  for (HeaderEntry& entry : entries) {
    if (entry.name == kMetadataKey || !names.insert(entry.name).second)
      throw_invalid(fmt::format("{} cannot have two tensors '{}'; rename one", what, entry.name));
    if (!is_utf8(entry.name)) {
      throw_invalid(fmt::format(
          "the name '{}' of a tensor is not UTF-8, which the safetensors format requires; rename it",
          entry.name));
    }
    entry.begin = at;
    at += byte_count(entry.type, entry.shape, fmt::format("tensor '{}'", entry.name));
    entry.end = at;
  }
  // push_back of pairs: ordered_json looks keys up linearly.
  auto& members = root.get_ref<nlohmann::ordered_json::object_t&>();
  members.reserve(members.size() + entries.size());
  for (const HeaderEntry& entry : entries) {
    nlohmann::ordered_json fields = nlohmann::ordered_json::object();
    fields["dtype"] = to_string(entry.type);
    fields["shape"] = entry.shape;
    fields["data_offsets"] = std::vector<std::uint64_t>{entry.begin, entry.end};
    members.emplace_back(entry.name, std::move(fields));
  }
  std::string json = dumped(root, what);
  const std::uint64_t used = kLengthBytes + json.size();
  const std::uint64_t start = (used + alignment - 1) / alignment * alignment;
  json.append(start - used, ' ');
  if (json.size() > kMostHeaderBytes) {
    throw_invalid(
        fmt::format("{} with {} tensors needs a header of {} bytes; the format allows {}: use "
                    "shorter names or several files",
                    what, entries.size(), json.size(), kMostHeaderBytes));
  }
  ByteWriter out;
  out.put(static_cast<std::uint64_t>(json.size()));
  out.put_bytes(std::as_bytes(std::span(json)));
  return {{std::move(entries), metadata, start}, out.take()};
}

}  // namespace torchspan::checkpoint
