#include "collective/half_floats.h"

#include <bit>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchspan::collective {
namespace {

#if defined(__x86_64__)

/// Every processor with AVX2 has these instructions; clang has no name for them alone.
bool has_half_instructions() { return __builtin_cpu_supports("avx2"); }

/// Converts whole groups of eight; returns the number of converted elements.
__attribute__((target("avx,f16c"))) std::size_t widen_groups(const c10::Half* from, float* to,
                                                             std::size_t count) {
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
    _mm256_storeu_ps(to + at, _mm256_cvtph_ps(halves));
  }
  return at;
}

__attribute__((target("avx,f16c"))) std::size_t narrow_groups(const float* from, c10::Half* to,
                                                              std::size_t count) {
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + at), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at), halves);
  }
  return at;
}

#else

bool has_half_instructions() { return false; }
std::size_t widen_groups(const c10::Half*, float*, std::size_t) { return 0; }
std::size_t narrow_groups(const float*, c10::Half*, std::size_t) { return 0; }

#endif

}  // namespace

void widen_half(const c10::Half* from, float* to, std::size_t count) {
  for (std::size_t i = has_half_instructions() ? widen_groups(from, to, count) : 0; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

void narrow_half(const float* from, c10::Half* to, std::size_t count) {
  for (std::size_t i = has_half_instructions() ? narrow_groups(from, to, count) : 0; i < count; ++i) {
    to[i] = static_cast<c10::Half>(from[i]);
  }
}

void widen_bfloat(const c10::BFloat16* from, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i].x) << 16);
  }
}

void narrow_bfloat(const float* from, c10::BFloat16* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(from[i]);
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const bool is_number = from[i] == from[i];
    to[i].x = static_cast<std::uint16_t>(is_number ? rounded : 0x7FC0U);
  }
}

}  // namespace torchspan::collective
