#include <algorithm>
#include <fmt/format.h>
#include <limits>

#include <torchspan/core/bytes.h>

namespace torchspan {

void ByteWriter::put_string(std::string_view text) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a string of {} bytes is longer than the wire's limit of 4 GiB", text.size()));
  }
  put(static_cast<std::uint32_t>(text.size()));
  put_bytes(std::as_bytes(std::span(text.data(), text.size())));
}

void ByteWriter::throw_bad_patch(std::size_t offset, std::size_t size) const {
  throw Error(ErrorKind::kInvalid, fmt::format("{} bytes at offset {} were never written; only {} bytes were",
                                               size, offset, bytes_.size()));
}

std::string ByteReader::get_string() {
  const auto size = get<std::uint32_t>();
  BytesView raw = get_bytes(size);
  return std::string(reinterpret_cast<const char*>(raw.data()), raw.size());
}

std::size_t ByteReader::get_count(std::size_t least_size) {
  const std::size_t count = get<std::uint32_t>();
  least_size = std::max<std::size_t>(least_size, 1);
  if (count > left() / least_size) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{} elements of {} bytes or more cannot be in the {} bytes left", count,
                            least_size, left()));
  }
  return count;
}

void ByteReader::expect_end() const {
  if (!at_end()) {
    throw Error(ErrorKind::kInvalid, fmt::format("{} bytes are left over at offset {}", left(), position_));
  }
}

void ByteReader::throw_truncated(std::size_t wanted) const {
  throw Error(ErrorKind::kInvalid,
              fmt::format("bytes end early: {} wanted at offset {} of {}", wanted, position_, bytes_.size()));
}

}  // namespace torchspan
