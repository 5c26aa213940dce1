#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "checkpoint/files/disk.h"
#include "checkpoint/files/header.h"

namespace torchspan::checkpoint {

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
