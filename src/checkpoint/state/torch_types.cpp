#include "checkpoint/state/torch_types.h"

#include <array>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "device/api/torch_version.h"

namespace torchspan::checkpoint {
namespace {

/// Of types that this LibTorch lacks.
constexpr at::ScalarType kAbsentType = at::ScalarType::Undefined;

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 1)
constexpr auto kFloat8e5m2 = at::ScalarType::Float8_e5m2, kFloat8e4m3 = at::ScalarType::Float8_e4m3fn;
#else
constexpr auto kFloat8e5m2 = kAbsentType, kFloat8e4m3 = kAbsentType;
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 2)
constexpr auto kFloat8e5m2fnuz = at::ScalarType::Float8_e5m2fnuz;
constexpr auto kFloat8e4m3fnuz = at::ScalarType::Float8_e4m3fnuz;
#else
constexpr auto kFloat8e5m2fnuz = kAbsentType, kFloat8e4m3fnuz = kAbsentType;
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 3)
constexpr auto kUInt16 = at::ScalarType::UInt16, kUInt32 = at::ScalarType::UInt32;
constexpr auto kUInt64 = at::ScalarType::UInt64;
#else
constexpr auto kUInt16 = kAbsentType, kUInt32 = kAbsentType, kUInt64 = kAbsentType;
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 8)
constexpr auto kFloat8e8m0 = at::ScalarType::Float8_e8m0fnu;
#else
constexpr auto kFloat8e8m0 = kAbsentType;
#endif

constexpr std::array<std::pair<at::ScalarType, ElementType>, 19> kTypePairs{{
    {at::kBool, ElementType::kBool},
    {at::kByte, ElementType::kU8},
    {at::kChar, ElementType::kI8},
    {at::kShort, ElementType::kI16},
    {at::kInt, ElementType::kI32},
    {at::kLong, ElementType::kI64},
    {at::kHalf, ElementType::kF16},
    {at::kBFloat16, ElementType::kBF16},
    {at::kFloat, ElementType::kF32},
    {at::kDouble, ElementType::kF64},
    {at::kComplexFloat, ElementType::kC64},
    {kFloat8e5m2, ElementType::kF8E5M2},
    {kFloat8e4m3, ElementType::kF8E4M3},
    {kFloat8e5m2fnuz, ElementType::kF8E5M2Fnuz},
    {kFloat8e4m3fnuz, ElementType::kF8E4M3Fnuz},
    {kFloat8e8m0, ElementType::kF8E8M0},
    {kUInt16, ElementType::kU16},
    {kUInt32, ElementType::kU32},
    {kUInt64, ElementType::kU64},
}};

}  // namespace

std::optional<ElementType> element_type_of(at::ScalarType type) {
  for (const auto& [ours, theirs] : kTypePairs) {
    if (ours == type && ours != kAbsentType) return theirs;
  }
  return std::nullopt;
}

std::optional<at::ScalarType> scalar_type_of(ElementType type) {
  for (const auto& [ours, theirs] : kTypePairs) {
    if (theirs == type && ours != kAbsentType) return ours;
  }
  return std::nullopt;
}

at::Tensor borrow_tensor(const std::byte* data, at::IntArrayRef sizes, at::ScalarType type) {
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, type);
  return at::from_blob(const_cast<std::byte*>(data), sizes, at::TensorOptions(type));
}

}  // namespace torchspan::checkpoint
