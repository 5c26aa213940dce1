#pragma once
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace torchspan {

/// Returns the decimal number that is the whole of `text`; nullopt for other texts, and if it does not fit into T.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace torchspan
