#include "fashion_mnist/idx.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <memory>
#include <span>
#include <string_view>
#include <zlib.h>

#include <torchspan/core/error.h>

namespace fashion_mnist {
namespace {

using torchspan::Error;
using torchspan::ErrorKind;

constexpr std::string_view kAdvice =
    "Install the data with 'apt-get install --reinstall dataset-fashion-mnist', or name the folder of "
    "another "
    "copy with --data DIR";
constexpr std::uint8_t kUnsignedByte = 0x08;
/// Maximum size of an unzipped file: Fashion-MNIST's largest has 47 MB.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

[[noreturn]] void fail(const std::string& path, const std::string& reason) {
  throw Error(ErrorKind::kInvalid, fmt::format("{} {}. {}", path, reason, kAdvice));
}

struct GzipCloser {
  void operator()(gzFile file) const { gzclose(file); }
};

/// Reads and unzips the whole file.
std::vector<std::uint8_t> read_all(const std::string& path) {
  errno = 0;
  const std::unique_ptr<gzFile_s, GzipCloser> file(gzopen(path.c_str(), "rb"));
  if (!file) fail(path, fmt::format("cannot be opened: {}", std::strerror(errno == 0 ? ENOMEM : errno)));
  std::vector<std::uint8_t> bytes;
  std::vector<std::uint8_t> chunk(std::size_t{1} << 20);
  while (true) {
    const int count = gzread(file.get(), chunk.data(), static_cast<unsigned>(chunk.size()));
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + (count > 0 ? count : 0));
    int code = Z_OK;
    const std::string text = gzerror(file.get(), &code);
    if (code == Z_BUF_ERROR) {
      fail(path, fmt::format("is truncated: the gzip stream ends after {} unzipped bytes", bytes.size()));
    }
    if (count < 0 || code != Z_OK) {
      fail(path, fmt::format("is damaged after {} unzipped bytes: {}", bytes.size(),
                             code == Z_ERRNO ? std::strerror(errno) : text));
    }
    if (count == 0) return bytes;
    if (bytes.size() > kMostBytes) fail(path, fmt::format("unzips to more than {} bytes", kMostBytes));
  }
}

std::uint32_t big_endian(std::span<const std::uint8_t, 4> bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 |
         bytes[3];
}

}  // namespace

IdxArray read_idx(const std::string& path, std::size_t dimensions) {
  IdxArray array;
  array.bytes = read_all(path);
  const std::size_t header = 4 + 4 * dimensions;
  const std::array<std::uint8_t, 4> magic = {0, 0, kUnsignedByte, static_cast<std::uint8_t>(dimensions)};
  const std::span<const std::uint8_t> bytes(array.bytes);
  if (bytes.size() >= magic.size() && !std::equal(magic.begin(), magic.end(), bytes.begin())) {
    fail(path,
         fmt::format("is not an IDX file of unsigned bytes with {} dimension{}: it begins with {:02x}, which "
                     "should be {:02x}",
                     dimensions, dimensions == 1 ? "" : "s", fmt::join(bytes.first(4), " "),
                     fmt::join(magic, " ")));
  }
  if (bytes.size() < header) {
    fail(path,
         fmt::format("is truncated: it holds {} bytes, and its header alone takes {}", bytes.size(), header));
  }
  std::size_t expected = 1;
  for (std::size_t i = 0; i < dimensions; ++i) {
    const std::uint32_t size = big_endian(bytes.subspan(4 + 4 * i).first<4>());
    array.sizes.push_back(size);
    expected = size != 0 && expected > kMostBytes / size ? kMostBytes + 1 : expected * size;
  }
  if (bytes.size() - header != expected) {
    fail(path, fmt::format("{}: its header says {} elements, and {} follow",
                           bytes.size() - header < expected ? "is truncated" : "is too long",
                           fmt::join(array.sizes, " x "), bytes.size() - header));
  }
  array.bytes.erase(array.bytes.begin(), array.bytes.begin() + static_cast<std::ptrdiff_t>(header));
  return array;
}

}  // namespace fashion_mnist
