#include "checkpoint/files/tensor_file.h"

#include <algorithm>
#include <fmt/format.h>
#include <tuple>
#include <utility>

#include <torchspan/core/error.h>

#include "checkpoint/files/checksum.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

/// Hashes the data while it is still in the cache.
class HashingObserver final : public WriteObserver {
 public:
  void written(BytesView part) override { checksum_.add(part); }
  std::uint64_t finish() { return checksum_.finish(); }

 private:
  Checksum checksum_;
};

}  // namespace

WrittenFile write_tensor_file(const Disk& disk, const std::string& path, std::vector<HeaderEntry> entries,
                              const std::vector<BytesView>& data, const Metadata& metadata) {
  EncodedHeader encoded = encode_header(std::move(entries), metadata, kPageBytes);
  WrittenFile written;
  written.header = std::move(encoded.header);
  const auto file = disk.create(path);
  file->append(encoded.bytes);
  written.head_checksum = checksum_of(encoded.bytes);
  HashingObserver observer;
  auto piece = data.begin();
  for (const HeaderEntry& entry : written.header.entries) {
    const std::uint64_t needed = entry.end - entry.begin;
    std::uint64_t given = 0;
    for (; given < needed && piece != data.end(); ++piece) {
      file->append(*piece, &observer);
      given += piece->size();
    }
    if (given != needed) {
      throw_invalid(
          fmt::format("tensor '{}' needs {} bytes of data, but {} were given", entry.name, needed, given));
    }
    written.checksums.push_back(observer.finish());
  }
  if (std::any_of(piece, data.end(), [](BytesView rest) { return !rest.empty(); }))
    throw_invalid(fmt::format("there is more data than the {} tensors need", written.header.entries.size()));
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
