#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace torchspan::checkpoint {

/// Element types of the safetensors format.
enum class ElementType : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

/// The format's name: "F32".
std::string_view to_string(ElementType type);
/// Nullopt for a name that the format does not have.
std::optional<ElementType> element_type_named(std::string_view name);
/// Bits per element: 4, 6 or a multiple of 8.
std::uint32_t bits_of(ElementType type);

}  // namespace torchspan::checkpoint
