#include "checkpoint/api/source_names.h"

#include <charconv>
#include <fmt/format.h>
#include <iterator>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>

namespace torchspan::checkpoint {
namespace {

constexpr std::string_view kRank = "rank";

void require_not_below(const std::string& owner, const StateSource& source, const std::string& name) {
  if (!source.owns_names() || !name.starts_with(owner + ".")) return;
  throw_invalid(fmt::format(
      "'{}' cannot be registered together with '{}', whose tensors have names that begin with '{}.'; use a "
      "name without this beginning",
      name, owner, owner));
}

/// 3 of "rank3.group.0.lr"; nullopt for other names.
std::optional<std::size_t> rank_in(const std::string& entry) {
  const std::size_t dot = entry.find('.');
  if (!entry.starts_with(kRank) || dot == std::string::npos) return std::nullopt;
  std::size_t rank = 0;
  const char* end = entry.data() + dot;
  const auto parsed = std::from_chars(entry.data() + kRank.size(), end, rank);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(rank) : std::nullopt;
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

}  // namespace torchspan::checkpoint
