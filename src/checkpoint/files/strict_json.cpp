#include "checkpoint/files/strict_json.h"

#include <charconv>
#include <fmt/format.h>
#include <limits>
#include <set>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

using Json = nlohmann::json;

/// Builds the document and refuses what nlohmann::json accepts: duplicate keys and deep nesting.
class StrictHandler final : public nlohmann::json_sax<Json> {
 public:
  explicit StrictHandler(std::size_t most_depth) : most_depth_(most_depth) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (open_.back()->contains(name)) return fail(fmt::format("the key '{}' appears twice", name));
    key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail(fmt::format("malformed JSON at byte {}", position));
  }

  Json take() { return std::move(root_); }
  const std::string& why() const { return why_; }

 private:
  bool fail(std::string why) {
    why_ = std::move(why);
    return false;
  }
  Json* place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }
  bool put(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (open_.size() == most_depth_) return fail(fmt::format("nested deeper than {} levels", most_depth_));
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::size_t most_depth_;
  Json root_;
  std::vector<Json*> open_;  ///< only the last one grows, so these stay valid
  std::string key_;
  std::string why_ = "malformed JSON";
};

}  // namespace

Json parse_strictly(std::string_view text, std::size_t most_depth, const std::string& what) {
  StrictHandler handler(most_depth);
  if (!Json::sax_parse(text, &handler)) throw_invalid("{}: {}", what, handler.why());
  return handler.take();
}

JsonObject::JsonObject(const Json& value, std::string where) : value_(value), where_(std::move(where)) {
  if (!value.is_object()) refuse("expected an object");
}

void JsonObject::refuse(const std::string& why) const { throw_invalid("{}: {}", where_, why); }

const Json& JsonObject::member(const char* name) const {
  const auto found = value_.find(name);
  if (found == value_.end()) refuse(fmt::format("'{}' is missing", name));
  return *found;
}

std::string JsonObject::text(const char* name) const {
  const Json& value = member(name);
  if (!value.is_string()) refuse(fmt::format("'{}' is not a string", name));
  return value.get<std::string>();
}

std::uint64_t JsonObject::number(const char* name) const {
  const Json& value = member(name);
  if (!value.is_number_unsigned()) refuse(fmt::format("'{}' is not an integer of at least 0", name));
  return value.get<std::uint64_t>();
}

std::int64_t JsonObject::signed_number(const char* name) const {
  const Json& value = member(name);
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > kMost))
    refuse(fmt::format("'{}' is not an integer of 64 bits", name));
  return value.get<std::int64_t>();
}

const Json& JsonObject::list(const char* name) const {
  const Json& value = member(name);
  if (!value.is_array()) refuse(fmt::format("'{}' is not a list", name));
  return value;
}

std::vector<std::int64_t> JsonObject::sizes(const char* name) const {
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::vector<std::int64_t> result;
  for (const Json& value : list(name)) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMost)
      refuse(fmt::format("'{}' has an entry that is not an integer from 0 to 2^63 - 1", name));
    result.push_back(static_cast<std::int64_t>(value.get<std::uint64_t>()));
  }
  return result;
}

std::string dumped(const nlohmann::ordered_json& value, const std::string& what) {
  try {
    return value.dump();
  } catch (const nlohmann::ordered_json::exception&) {
    throw_invalid("{}: a name or text is not UTF-8; rename it", what);
  }
}

bool is_utf8(std::string_view text) {
  try {
    static_cast<void>(Json(std::string(text)).dump());
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

std::string checksum_text(std::uint64_t number) { return fmt::format("{:016x}", number); }

std::uint64_t parse_checksum(std::string_view text, const std::string& what) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, 16);
  // One text per number: a changed bit must not go unnoticed.
  if (error != std::errc() || end != text.data() + text.size() || checksum_text(number) != text)
    throw_invalid("{}: '{}' is not a checksum of 16 hexadecimal digits", what, text);
  return number;
}

}  // namespace torchspan::checkpoint
