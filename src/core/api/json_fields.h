#pragma once
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace torchspan {

/// Returns a field of JSON that another process wrote; nullopt if it is missing, has another type, or does not fit
/// into T: a text, a flag, a whole number, or a number.
template <class T>
std::optional<T> json_field(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return std::nullopt;
  if constexpr (std::is_same_v<T, std::string>) {
    if (found->is_string()) return found->template get<T>();
  } else if constexpr (std::is_same_v<T, bool>) {
    if (found->is_boolean()) return found->template get<T>();
  } else if constexpr (std::is_floating_point_v<T>) {
    if (found->is_number()) return found->template get<T>();
  } else if (found->is_number_unsigned()) {
    if (const auto number = found->template get<std::uint64_t>(); std::in_range<T>(number))
      return static_cast<T>(number);
  } else if (found->is_number_integer()) {
    if (const auto number = found->template get<std::int64_t>(); std::in_range<T>(number))
      return static_cast<T>(number);
  }
  return std::nullopt;
}

/// Reads the required fields of such an object, and notes if one is missing or wrong.
class JsonFields {
 public:
  /// Keeps a reference to `value`, which may be any JSON.
  explicit JsonFields(const nlohmann::json& value) : value_(value) {}

  /// Whether the value is an object whose fields that were read were there.
  bool good() const { return good_; }
  template <class T>
  T require(const char* name) {
    return checked(json_field<T>(value_, name));
  }
  /// A number from `least` to `most`.
  template <class T>
  T require(const char* name, T least, T most) {
    const auto number = json_field<T>(value_, name);
    return checked(number && *number >= least && *number <= most ? number : std::nullopt);
  }
  /// A list of at most `most` entries.
  const nlohmann::json& require_list(const char* name, std::size_t most) {
    static const nlohmann::json nothing = nlohmann::json::array();
    const auto found = value_.find(name);
    if (found != value_.end() && found->is_array() && found->size() <= most) return *found;
    good_ = false;
    return nothing;
  }

 private:
  template <class T>
  T checked(std::optional<T> field) {
    good_ &= field.has_value();
    return std::move(field).value_or(T());
  }

  const nlohmann::json& value_;
  bool good_ = true;
};

}  // namespace torchspan
