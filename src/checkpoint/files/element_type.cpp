#include "checkpoint/files/element_type.h"

#include <array>
#include <cstddef>

namespace torchspan::checkpoint {
namespace {

struct ElementRow {
  std::string_view name;
  std::uint32_t bits;
};

/// By the number of the ElementType.
constexpr std::array<ElementRow, 22> kElementRows{{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
}};

}  // namespace

std::string_view to_string(ElementType type) { return kElementRows[static_cast<std::size_t>(type)].name; }

std::optional<ElementType> element_type_named(std::string_view name) {
  for (std::size_t i = 0; i < kElementRows.size(); ++i) {
    if (kElementRows[i].name == name) return static_cast<ElementType>(i);
  }
  return std::nullopt;
}

std::uint32_t bits_of(ElementType type) { return kElementRows[static_cast<std::size_t>(type)].bits; }

}  // namespace torchspan::checkpoint
