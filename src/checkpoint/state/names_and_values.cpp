#include "checkpoint/api/names_and_values.h"

#include <cstdint>
#include <fmt/format.h>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <variant>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>

#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::string_view kRank = "rank";

void require_not_below(const std::string& owner, const StateSource& source, const std::string& name) {
  if (!source.owns_names() || !name.starts_with(owner + ".")) return;
  throw_invalid(
      "'{}' cannot be registered together with '{}', whose tensors have names that begin with '{}.'; use a "
      "name without this beginning",
      name, owner, owner);
}

/// 3 of "rank3.group.0.lr"; nullopt for other names.
std::optional<std::size_t> rank_in(const std::string& entry) {
  const std::size_t dot = entry.find('.');
  if (!entry.starts_with(kRank) || dot == std::string::npos) return std::nullopt;
  return parse_number<std::size_t>(std::string_view(entry).substr(kRank.size(), dot - kRank.size()));
}

}  // namespace

void require_separate_names(const std::string& name, const StateSource& source, const std::string& other_name,
                            const StateSource& other) {
  require_not_below(other_name, other, name);
  require_not_below(name, source, other_name);
}

std::string name_of_rank(const std::string& name, std::size_t rank) {
  return fmt::format("{}.rank{}", name, rank);
}

std::string name_for_rank(const StateReader& reader, std::size_t rank) {
  const std::string name = reader.full_name("");
  std::set<std::size_t> saved;
  for (const std::string& entry : reader.names()) {
    const std::optional<std::size_t> of = rank_in(entry);
    if (!of) return name;
    saved.insert(*of);
  }
  if (saved.empty()) return name;
  if (saved.contains(rank)) return name_of_rank(name, rank);
  return name_of_rank(name, *std::next(saved.begin(), static_cast<std::ptrdiff_t>(rank % saved.size())));
}

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
      throw_invalid("another rank sent a value of the unknown type {}; run the same release on all ranks",
                    type);
  }
}

}  // namespace torchspan::checkpoint
