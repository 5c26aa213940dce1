#pragma once
#include <cstddef>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torchspan::collective {

/// Converts between float and half, rounded to nearest, ties to even, like c10's conversions but many
/// elements at a time.
void widen_half(const c10::Half* from, float* to, std::size_t count);
void narrow_half(const float* from, c10::Half* to, std::size_t count);
void widen_bfloat(const c10::BFloat16* from, float* to, std::size_t count);
void narrow_bfloat(const float* from, c10::BFloat16* to, std::size_t count);

}  // namespace torchspan::collective
