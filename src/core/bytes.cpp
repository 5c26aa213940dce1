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

std::string ByteReader::get_string() {
  const auto size = get<std::uint32_t>();
  BytesView raw = get_bytes(size);
  return std::string(reinterpret_cast<const char*>(raw.data()), raw.size());
}

std::size_t ByteReader::get_count(std::size_t least_size) {
  const std::size_t count = get<std::uint32_t>();
  if (least_size != 0 && count > left() / least_size) throw_truncated(count * least_size);
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
