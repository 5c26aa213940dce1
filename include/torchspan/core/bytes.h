#pragma once
// Bytes, and readers and writers of fixed-width and variable-width numbers in them. Includes no LibTorch.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>

namespace torchspan {

using Bytes = std::vector<std::byte>;
using BytesView = std::span<const std::byte>;

/// Types that can be written as their bytes; long double has indeterminate padding.
template <class T>
concept FixedWidth = (std::is_arithmetic_v<T> && !std::is_same_v<T, long double>) || std::is_enum_v<T>;

/// Appends little-endian values to an owned byte string. Not thread-safe.
class ByteWriter {
 public:
  ByteWriter() = default;
  /// Appends to `bytes` and uses its capacity.
  explicit ByteWriter(Bytes bytes) : bytes_(std::move(bytes)) {}

  template <FixedWidth T>
  void put(T value) {
    static_assert(std::endian::native == std::endian::little,
                  "TorchSpan supports little-endian machines only");
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), raw, raw + sizeof(T));
  }
  void put_bytes(BytesView bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  /// Writes a u32 length, then the characters.
  void put_string(std::string_view text);

  const Bytes& bytes() const { return bytes_; }
  Bytes take() { return std::move(bytes_); }
  std::size_t size() const { return bytes_.size(); }
  /// Overwrites a value written earlier at `offset`; throws Error{kInvalid} if out of range.
  template <FixedWidth T>
  void patch(std::size_t offset, T value) {
    if (offset > bytes_.size() || sizeof(T) > bytes_.size() - offset) throw_bad_patch(offset, sizeof(T));
    std::memcpy(bytes_.data() + offset, &value, sizeof(T));
  }

 private:
  [[noreturn]] void throw_bad_patch(std::size_t offset, std::size_t size) const;

  Bytes bytes_;
};

/// Reads what ByteWriter wrote, from borrowed bytes. Reading past the end, or a length that cannot fit,
/// throws Error{kInvalid}. It never allocates more than the bytes that are present.
class ByteReader {
 public:
  explicit ByteReader(BytesView bytes) : bytes_(bytes) {}

  template <FixedWidth T>
  T get() {
    BytesView raw = get_bytes(sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      return static_cast<std::uint8_t>(raw[0]) != 0;
    } else {
      T value;
      std::memcpy(&value, raw.data(), sizeof(T));
      return value;
    }
  }
  BytesView get_bytes(std::size_t size) {
    if (size > left()) throw_truncated(size);
    BytesView part = bytes_.subspan(position_, size);
    position_ += size;
    return part;
  }
  std::string get_string();
  /// Reads a u32 count of elements that take at least `least_size` bytes each (at least one). Checked
  /// against the remaining bytes, so it is safe to reserve for.
  std::size_t get_count(std::size_t least_size);

  std::size_t left() const { return bytes_.size() - position_; }
  bool at_end() const { return left() == 0; }
  /// Throws Error{kInvalid} unless every byte was read.
  void expect_end() const;

 private:
  [[noreturn]] void throw_truncated(std::size_t wanted) const;

  BytesView bytes_;
  std::size_t position_ = 0;
};

}  // namespace torchspan
