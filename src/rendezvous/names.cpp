#include "rendezvous/api/names.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace torchspan::rendezvous {
namespace {

constexpr std::size_t kMostCharacters = 127;

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
         c == ':' || c == '-';
}

}  // namespace

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= kMostCharacters &&
         std::all_of(name.begin(), name.end(), is_name_character);
}

void check_name(std::string_view name, std::string_view what) {
  if (is_name(name)) return;
  const bool shortened = name.size() > kMostCharacters;
  throw Error(ErrorKind::kInvalid,
              fmt::format("{} is '{}'{}; expected 1 to {} of the characters A-Z a-z 0-9 _ . : -", what,
                          name.substr(0, 40), shortened ? fmt::format("… ({} characters)", name.size()) : "",
                          kMostCharacters));
}

}  // namespace torchspan::rendezvous
