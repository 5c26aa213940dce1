#include "checkpoint/files/safetensors.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <new>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <xxhash.h>

#include <torchspan/core/error.h>

#include "checkpoint/files/disk.h"
#include "checkpoint/files/strict_json.h"
#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

struct ElementRow {
  std::string_view name;
  std::uint32_t bits;
};

/// By the number of the ElementType.
constexpr std::array<ElementRow, 22> kElementRows{{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
}};

}  // namespace

std::string_view to_string(ElementType type) { return kElementRows[static_cast<std::size_t>(type)].name; }

std::optional<ElementType> element_type_named(std::string_view name) {
  for (std::size_t i = 0; i < kElementRows.size(); ++i) {
    if (kElementRows[i].name == name) return static_cast<ElementType>(i);
  }
  return std::nullopt;
}

std::uint32_t bits_of(ElementType type) { return kElementRows[static_cast<std::size_t>(type)].bits; }

std::uint64_t checksum_of(BytesView bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Checksum::State {
  State() : state(XXH3_createState()) {
    if (state == nullptr) throw std::bad_alloc();
    XXH3_64bits_reset(state);
  }
  ~State() { XXH3_freeState(state); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* const state;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;

void Checksum::add(BytesView part) { XXH3_64bits_update(state_->state, part.data(), part.size()); }

std::uint64_t Checksum::finish() {
  const std::uint64_t value = XXH3_64bits_digest(state_->state);
  XXH3_64bits_reset(state_->state);
  return value;
}

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
      throw_invalid("{}: the data of tensor '{}' begins at {}, but the data before it ends at {}", what,
                    entry.name, entry.begin, at);
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    throw_invalid("{}: the header describes {} bytes of data, but the file has {}{}", what, at, data_bytes,
                  at > data_bytes ? ": it is truncated" : "");
  }
}

}  // namespace

std::optional<std::int64_t> element_count(const Sizes& shape) {
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(count, size, &count)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : count;
}

std::uint64_t byte_count(ElementType type, const Sizes& shape, const std::string& what) {
  const std::optional<std::int64_t> count = element_count(shape);
  std::int64_t bits = 0;
  if (!count || __builtin_mul_overflow(*count, std::int64_t{bits_of(type)}, &bits))
    throw_invalid("{}: the shape {} is too large", what, describe(shape));
  if (bits % 8 != 0) {
    throw_invalid("{}: {} elements of dtype {} are not a whole number of bytes", what, *count,
                  to_string(type));
  }
  return static_cast<std::uint64_t>(bits) / 8;
}

std::uint64_t header_bytes(BytesView first_bytes, std::uint64_t file_bytes, const std::string& what) {
  if (file_bytes < kLengthBytes || first_bytes.size() < kLengthBytes) {
    throw_invalid("{}: the file has {} bytes, fewer than the length of a header", what,
                  std::min<std::uint64_t>(file_bytes, first_bytes.size()));
  }
  const auto length = ByteReader(first_bytes).get<std::uint64_t>();
  if (length > kMostHeaderBytes) {
    throw_invalid("{}: the header would have {} bytes; the format allows {}", what, length, kMostHeaderBytes);
  }
  if (length > file_bytes - kLengthBytes) {
    throw_invalid("{}: the header has {} bytes, but the file only {}: it is truncated", what, length,
                  file_bytes);
  }
  return kLengthBytes + length;
}

Header parse_header(BytesView bytes, std::uint64_t file_bytes, const std::string& what) {
  Header header;
  header.data_start = header_bytes(bytes, file_bytes, what);
  if (bytes.size() < header.data_start) throw_invalid("{}: the header is cut off", what);
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  const std::string_view json(text, header.data_start - kLengthBytes);
  if (json.empty() || json.front() != '{') throw_invalid("{}: no safetensors header", what);
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
      throw_invalid("{} cannot have two tensors '{}'; rename one", what, entry.name);
    if (!is_utf8(entry.name)) {
      throw_invalid(
          "the name '{}' of a tensor is not UTF-8, which the safetensors format requires; rename it",
          entry.name);
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
        "{} with {} tensors needs a header of {} bytes; the format allows {}: use shorter names or several "
        "files",
        what, entries.size(), json.size(), kMostHeaderBytes);
  }
  ByteWriter out;
  out.put(static_cast<std::uint64_t>(json.size()));
  out.put_bytes(std::as_bytes(std::span(json)));
  return {{std::move(entries), metadata, start}, out.take()};
}

namespace {

std::string safetensors_file(const std::string& path) { return fmt::format("safetensors file '{}'", path); }

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_disk_error("open", path_, errno);
  struct stat status {};
  void* mapped = MAP_FAILED;
  int failure = 0;
  if (::fstat(fd, &status) != 0) {
    failure = errno;
  } else if (!S_ISREG(status.st_mode)) {
    failure = EISDIR;
  } else if (status.st_size > 0) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    device_ = status.st_dev;
    inode_ = status.st_ino;
    mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) failure = errno;
  }
  ::close(fd);
  if (failure != 0) throw_disk_error("map", path_, failure);
  if (mapped == MAP_FAILED) throw_invalid(safetensors_file(path_) + ": the file is empty");
  data_ = static_cast<std::byte*>(mapped);
  ::madvise(mapped, size_, MADV_SEQUENTIAL);
  try {
    header_ = parse_header({data_, size_}, size_, safetensors_file(path_));
  } catch (...) {
    ::munmap(mapped, size_);
    throw;
  }
  for (const HeaderEntry& entry : header_.entries) by_name_.emplace(entry.name, &entry);
}

MappedFile::~MappedFile() { ::munmap(data_, size_); }

Buffer MappedFile::map_again(BytesView part) const {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<std::size_t>(part.data() - data_);
  const std::size_t begin = offset / page * page;
  const std::size_t length = offset - begin + part.size();
  struct stat status {};
  void* mapped = MAP_FAILED;
  if (::fstat(fd, &status) == 0 && status.st_dev == device_ && status.st_ino == inode_) {
    mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd,
                    static_cast<off_t>(begin));
  }
  ::close(fd);
  if (mapped == MAP_FAILED) return {};
  std::shared_ptr<void> owner(mapped, [length](void* memory) { ::munmap(memory, length); });
  return {static_cast<std::byte*>(mapped) + (offset - begin), part.size(), std::move(owner)};
}

const HeaderEntry* MappedFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

namespace {

constexpr std::uint64_t kPageBytes = 4096;

}  // namespace

WrittenFile write_tensor_file(const Disk& disk, const std::string& path, std::vector<HeaderEntry> entries,
                              const std::vector<BytesView>& data, const Metadata& metadata) {
  EncodedHeader encoded = encode_header(std::move(entries), metadata, kPageBytes);
  WrittenFile written;
  written.header = std::move(encoded.header);
  const auto file = disk.create(path);
  file->append(encoded.bytes);
  written.head_checksum = checksum_of(encoded.bytes);
  Checksum checksum;
  // Hashes the data while it is still in the cache.
  const auto hash = [&](BytesView part) { checksum.add(part); };
  auto piece = data.begin();
  for (const HeaderEntry& entry : written.header.entries) {
    const std::uint64_t needed = entry.end - entry.begin;
    std::uint64_t given = 0;
    for (; given < needed && piece != data.end(); ++piece) {
      file->append(*piece, hash);
      given += piece->size();
    }
    if (given != needed) {
      throw_invalid("tensor '{}' needs {} bytes of data, but {} were given", entry.name, needed, given);
    }
    written.checksums.push_back(checksum.finish());
  }
  if (std::any_of(piece, data.end(), [](BytesView rest) { return !rest.empty(); }))
    throw_invalid("there is more data than the {} tensors need", written.header.entries.size());
  file->sync();
  written.bytes = file->size();
  return written;
}

void sort_for_alignment(std::vector<HeaderEntry>& entries) {
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::make_tuple(bits_of(b.type), std::string_view(a.name)) <
           std::make_tuple(bits_of(a.type), std::string_view(b.name));
  });
}

}  // namespace torchspan::checkpoint
