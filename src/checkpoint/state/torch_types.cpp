#include "checkpoint/state/torch_types.h"

#include <array>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "device/api/dtypes.h"

namespace torchspan::checkpoint {
namespace {

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
    {device::kFloat8e5m2, ElementType::kF8E5M2},
    {device::kFloat8e4m3, ElementType::kF8E4M3},
    {device::kFloat8e5m2fnuz, ElementType::kF8E5M2Fnuz},
    {device::kFloat8e4m3fnuz, ElementType::kF8E4M3Fnuz},
    {device::kFloat8e8m0, ElementType::kF8E8M0},
    {device::kUInt16, ElementType::kU16},
    {device::kUInt32, ElementType::kU32},
    {device::kUInt64, ElementType::kU64},
}};

}  // namespace

std::optional<ElementType> element_type_of(at::ScalarType type) {
  for (const auto& [ours, theirs] : kTypePairs) {
    if (ours == type && ours != device::kAbsent) return theirs;
  }
  return std::nullopt;
}

std::optional<at::ScalarType> scalar_type_of(ElementType type) {
  for (const auto& [ours, theirs] : kTypePairs) {
    if (theirs == type && ours != device::kAbsent) return ours;
  }
  return std::nullopt;
}

at::Tensor borrow_tensor(const std::byte* data, at::IntArrayRef sizes, at::ScalarType type) {
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, type);
  return at::from_blob(const_cast<std::byte*>(data), sizes, at::TensorOptions(type));
}

}  // namespace torchspan::checkpoint
