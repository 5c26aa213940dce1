#include "checkpoint/api/value_bytes.h"

#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <variant>

#include <torchspan/core/error.h>

namespace torchspan::checkpoint {

void put_value(ByteWriter& out, const Value& value) {
  out.put(static_cast<std::uint8_t>(value.index()));
  if (const auto* text = std::get_if<std::string>(&value)) return out.put_string(*text);
  if (const auto* flag = std::get_if<bool>(&value)) return out.put(*flag);
  if (const auto* number = std::get_if<double>(&value)) return out.put(*number);
  out.put(std::get<std::int64_t>(value));
}

Value get_value(ByteReader& in) {
  switch (const auto type = in.get<std::uint8_t>()) {
    case 0:
      return in.get<bool>();
    case 1:
      return in.get<std::int64_t>();
    case 2:
      return in.get<double>();
    case 3:
      return in.get_string();
    default:
      throw_invalid(fmt::format(
          "another rank sent a value of the unknown type {}; run the same release on all ranks", type));
  }
}

}  // namespace torchspan::checkpoint
