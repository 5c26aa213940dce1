#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

#include "checkpoint/files/disk.h"
#include "state/api/place.h"

namespace torchspan::checkpoint {

/// Element types of the safetensors format.
enum class ElementType : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

/// The format's name: "F32".
std::string_view to_string(ElementType type);
/// Nullopt for a name that the format does not have.
std::optional<ElementType> element_type_named(std::string_view name);
/// Bits per element: 4, 6 or a multiple of 8.
std::uint32_t bits_of(ElementType type);

/// XXH3 of 64 bits. It detects damage; it does not authenticate.
std::uint64_t checksum_of(BytesView bytes);

/// The same over consecutive parts.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void add(BytesView part);
  /// The checksum of all parts so far; starts over.
  std::uint64_t finish();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

using state::Box;
using state::describe;
using state::fits;
using state::Sizes;

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

/// Number of elements; nullopt if it exceeds 2^63 - 1 or a size is negative.
std::optional<std::int64_t> element_count(const Sizes& shape);
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

/// A safetensors file mapped into memory, for reading.
/// The file must not shrink while it is mapped; files that TorchSpan writes are replaced, never changed.
class MappedFile {
 public:
  /// Maps the file and parses its header. Throws an Error that names the path: it cannot be read, is not a
  /// safetensors file, or is truncated.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  const Header& header() const { return header_; }
  /// The bytes of the header, with its length.
  BytesView head() const { return {data_, header_.data_start}; }
  /// The data of an entry of header().
  BytesView data(const HeaderEntry& entry) const {
    return {data_ + header_.data_start + entry.begin, entry.end - entry.begin};
  }
  /// Maps `part` of this mapping once more, privately and writable: writes reach neither the file nor other mappings.
  /// The buffer has no owner if that is impossible: the path has another file now, or the process has too many
  /// mappings.
  Buffer map_again(BytesView part) const;
  /// Null if there is no such tensor.
  const HeaderEntry* find(std::string_view name) const;

 private:
  const std::string path_;
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  dev_t device_ = 0;  ///< with `inode_`, identifies the file
  ino_t inode_ = 0;
  Header header_;
  std::map<std::string_view, const HeaderEntry*> by_name_;
};

/// What was written: for the manifest.
struct WrittenFile {
  Header header;
  std::uint64_t bytes = 0;                 ///< of the file
  std::uint64_t head_checksum = 0;         ///< of the header
  std::vector<std::uint64_t> checksums{};  ///< of each entry's data
};

/// Writes a safetensors file and syncs it: `data` holds the bytes of the entries in the order of the file, those of an
/// entry in one or more consecutive pieces. The data begins at a multiple of the page size. Throws Error{kInvalid} if
/// sizes disagree, and what the disk throws.
WrittenFile write_tensor_file(const Disk& disk, const std::string& path, std::vector<HeaderEntry> entries,
                              const std::vector<BytesView>& data, const Metadata& metadata);

/// Sorts so that the data of every entry is aligned for its dtype: wide dtypes first, then by name.
void sort_for_alignment(std::vector<HeaderEntry>& entries);

}  // namespace torchspan::checkpoint
