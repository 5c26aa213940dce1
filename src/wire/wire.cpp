#include <limits>
#include <xxhash.h>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"

namespace torchspan::wire {

void NestingCounter::throw_too_deep() {
  throw_invalid(
      "the value is nested more than {} levels deep, which is the limit for sending; send a flat form of it",
      kMaxNesting);
}

std::size_t Decoder::get_index(std::size_t table_size, const char* table) {
  const auto index = bytes_.get<std::uint32_t>();
  if (index >= table_size) {
    throw_invalid("the value names {} {} of a message that has {}", table, index, table_size);
  }
  return index;
}

std::uint64_t digest(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

bool decode_flag(Decoder& decoder) {
  const auto byte = decoder.bytes().get<std::uint8_t>();
  if (byte > 1) throw_invalid("a flag byte is {}, not 0 or 1", byte);
  return byte == 1;
}

void encode_count(Encoder& encoder, std::size_t count) {
  if (count > std::numeric_limits<std::uint32_t>::max()) {
    throw_invalid("{} elements are more than the wire's limit of 2^32 - 1; send a tensor", count);
  }
  encoder.bytes().put(static_cast<std::uint32_t>(count));
}

void check_element_bytes(std::size_t count, std::size_t bytes) {
  if (bytes < count) {
    throw_invalid(
        "{} elements took only {} bytes; elements of a sequence must take at least one byte each: send their "
        "number instead",
        count, bytes);
  }
}

void throw_duplicate_key(const std::string& map_name) {
  throw_invalid("a received {} has the same key twice", map_name);
}

void throw_bad_alternative(std::size_t index, const std::string& variant_name) {
  if (index == std::variant_npos) {
    throw_invalid("a {} without a value cannot be sent", variant_name);
  }
  throw_invalid("a received {} has alternative {}", variant_name, index);
}

long double check_duration(long double value, long double least, long double most) {
  // The comparison is also false for a NaN.
  if (value >= least && value <= most) return value;
  throw_invalid(
      "a duration of {} units is outside its type's range [{}, {}]; durations are sent as 64-bit nanoseconds "
      "(292 years)",
      value, least, most);
}

}  // namespace torchspan::wire
