#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace torchspan::checkpoint {

/// Parses `text` completely. Throws Error{kInvalid} that begins with `what` for malformed JSON or UTF-8, a
/// duplicate key, or nesting deeper than `most_depth`.
nlohmann::json parse_strictly(std::string_view text, std::size_t most_depth, const std::string& what);

/// Reads the members of one parsed object; errors name `where` and the member.
class JsonObject {
 public:
  /// Throws Error{kInvalid} unless `value` is an object. Keeps a reference to it.
  JsonObject(const nlohmann::json& value, std::string where);

  const nlohmann::json& member(const char* name) const;
  bool has(const char* name) const { return value_.contains(name); }
  std::string text(const char* name) const;
  /// An integer from 0 to 2^64 - 1.
  std::uint64_t number(const char* name) const;
  std::int64_t signed_number(const char* name) const;
  /// A list of integers from 0 to 2^63 - 1.
  std::vector<std::int64_t> sizes(const char* name) const;
  const nlohmann::json& list(const char* name) const;
  JsonObject object(const char* name) const { return {member(name), where_ + ": " + name}; }
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  const nlohmann::json& value_;
  const std::string where_;
};

/// `value` as text; throws Error{kInvalid} naming `what` if a string is not UTF-8.
std::string dumped(const nlohmann::ordered_json& value, const std::string& what);

/// Whether `text` is UTF-8, as JSON requires.
bool is_utf8(std::string_view text);

/// A checksum as 16 hexadecimal digits, and back. Throws Error{kInvalid} naming `what` for other text.
std::string checksum_text(std::uint64_t number);
std::uint64_t parse_checksum(std::string_view text, const std::string& what);

}  // namespace torchspan::checkpoint
