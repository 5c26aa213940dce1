#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

#include "checkpoint/files/header.h"

namespace torchspan::checkpoint {

/// A safetensors file mapped into memory, for reading.
/// The file must not shrink while it is mapped; files that TorchSpan writes are replaced, never changed.
class MappedFile {
 public:
  /// Maps the file and parses its header. Throws an Error that names the path: it cannot be read, is no
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

}  // namespace torchspan::checkpoint
