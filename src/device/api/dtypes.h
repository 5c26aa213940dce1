#pragma once
#include <c10/core/ScalarType.h>

#include "device/api/torch_version.h"

/// Dtypes that not all supported LibTorch versions have; kAbsent if this one lacks them.
namespace torchspan::device {

inline constexpr at::ScalarType kAbsent = at::ScalarType::Undefined;

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 1)
inline constexpr auto kFloat8e5m2 = at::ScalarType::Float8_e5m2, kFloat8e4m3 = at::ScalarType::Float8_e4m3fn;
#else
inline constexpr auto kFloat8e5m2 = kAbsent, kFloat8e4m3 = kAbsent;
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 2)
inline constexpr auto kFloat8e5m2fnuz = at::ScalarType::Float8_e5m2fnuz;
inline constexpr auto kFloat8e4m3fnuz = at::ScalarType::Float8_e4m3fnuz;
#else
inline constexpr auto kFloat8e5m2fnuz = kAbsent, kFloat8e4m3fnuz = kAbsent;
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 3)
inline constexpr auto kUInt16 = at::ScalarType::UInt16, kUInt32 = at::ScalarType::UInt32;
inline constexpr auto kUInt64 = at::ScalarType::UInt64;
#else
inline constexpr auto kUInt16 = kAbsent, kUInt32 = kAbsent, kUInt64 = kAbsent;
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 8)
inline constexpr auto kFloat8e8m0 = at::ScalarType::Float8_e8m0fnu;
inline constexpr auto kFloat4e2m1x2 = at::ScalarType::Float4_e2m1fn_x2;
#else
inline constexpr auto kFloat8e8m0 = kAbsent, kFloat4e2m1x2 = kAbsent;
#endif

}  // namespace torchspan::device
