#include "collective/kernels.h"

#include <algorithm>
#include <array>
#include <complex>
#include <cstring>
#include <fmt/format.h>
#include <type_traits>

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "collective/half_floats.h"

namespace torchspan::collective {
namespace {

/// Elements per block, so that their sums stay in the L1 cache.
constexpr std::size_t kBlock = 1024;

/// The type in which elements of type T are summed, and the conversions.
template <class T>
struct Wide {
  using Type = T;
  static void widen(const T* from, T* to, std::size_t count) { std::copy_n(from, count, to); }
  static void narrow(const T* from, T* to, std::size_t count) { std::copy_n(from, count, to); }
};
template <>
struct Wide<c10::Half> {
  using Type = float;
  static void widen(const c10::Half* from, float* to, std::size_t count) { widen_half(from, to, count); }
  static void narrow(const float* from, c10::Half* to, std::size_t count) { narrow_half(from, to, count); }
};
template <>
struct Wide<c10::BFloat16> {
  using Type = float;
  static void widen(const c10::BFloat16* from, float* to, std::size_t count) {
    widen_bfloat(from, to, count);
  }
  static void narrow(const float* from, c10::BFloat16* to, std::size_t count) {
    narrow_bfloat(from, to, count);
  }
};

template <class T>
constexpr bool kIsComplex = std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

struct Sum {
  template <class T>
  static T join(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) return a || b;
    return static_cast<T>(a + b);
  }
};
struct Product {
  template <class T>
  static T join(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) return a && b;
    if constexpr (kIsComplex<T>) {
      return T(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
    }
    return static_cast<T>(a * b);
  }
};
struct Minimum {
  template <class T>
  static T join(T a, T b) {
    return a != a || a < b ? a : b;
  }
};
struct Maximum {
  template <class T>
  static T join(T a, T b) {
    return a != a || a > b ? a : b;
  }
};

struct BitAnd {
  template <class T>
  static T join(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <class T>
  static T join(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <class T>
  static T join(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

/// Sums of signed integers wrap around, as LibTorch's do.
template <class T>
using Wrapping = typename std::conditional_t<
    std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) >= 4,
    std::make_unsigned<std::conditional_t<std::is_same_v<T, bool> || !std::is_integral_v<T>, int, T>>,
    std::type_identity<T>>::type;

template <class Join, class T>
T join(T a, T b) {
  if constexpr (std::is_same_v<Join, Sum> || std::is_same_v<Join, Product>) {
    using W = Wrapping<T>;
    return static_cast<T>(Join::template join<W>(static_cast<W>(a), static_cast<W>(b)));
  } else {
    return Join::template join<T>(a, b);
  }
}

template <class T>
auto divisor_of(const Reducing& work) {
  using Real = decltype(std::abs(T()));
  return static_cast<Real>(work.ranks);
}

/// Two ranks whose elements need no conversion: reads the sources directly.
template <class T, class Join, bool kDivide>
void reduce_two(const Reducing& work) {
  const auto* a = reinterpret_cast<const T*>(work.sources[0]);
  const auto* b = reinterpret_cast<const T*>(work.sources[1]);
  std::array<T, kBlock> block;
  for (std::size_t at = 0; at < work.count; at += kBlock) {
    const std::size_t count = std::min(kBlock, work.count - at);
    if constexpr (kDivide) {
      const auto divisor = divisor_of<T>(work);
      for (std::size_t i = 0; i < count; ++i) block[i] = join<Join>(a[at + i], b[at + i]) / divisor;
    } else {
      for (std::size_t i = 0; i < count; ++i) block[i] = join<Join>(a[at + i], b[at + i]);
    }
    for (std::byte* target : work.targets) {
      std::memcpy(target + at * sizeof(T), block.data(), count * sizeof(T));
    }
  }
}

template <class T, class Join, bool kDivide>
void reduce(const Reducing& work) {
  using W = typename Wide<T>::Type;
  if constexpr (std::is_same_v<T, W>) {
    if (work.sources.size() == 2) return reduce_two<T, Join, kDivide>(work);
  }
  std::array<W, kBlock> sums, more;
  std::array<T, kBlock> results;
  for (std::size_t at = 0; at < work.count; at += kBlock) {
    const std::size_t count = std::min(kBlock, work.count - at);
    const auto source = [&](std::size_t rank) { return reinterpret_cast<const T*>(work.sources[rank]) + at; };
    Wide<T>::widen(source(0), sums.data(), count);
    for (std::size_t rank = 1; rank < work.sources.size(); ++rank) {
      const W* values = more.data();
      if constexpr (std::is_same_v<T, W>) {
        values = source(rank);
      } else {
        Wide<T>::widen(source(rank), more.data(), count);
      }
      for (std::size_t i = 0; i < count; ++i) sums[i] = join<Join>(sums[i], values[i]);
    }
    if constexpr (kDivide) {
      const auto divisor = divisor_of<W>(work);
      for (std::size_t i = 0; i < count; ++i) sums[i] /= divisor;
    }
    Wide<T>::narrow(sums.data(), results.data(), count);
    for (std::byte* target : work.targets) {
      std::memcpy(target + at * sizeof(T), results.data(), count * sizeof(T));
    }
  }
}

template <class T>
Kernel kernel_of(ReduceOp reduction) {
  if (reduction == kSum) return reduce<T, Sum, false>;
  if (reduction == kProduct) return reduce<T, Product, false>;
  if constexpr (!std::is_integral_v<T>) {
    if (reduction == kAvg) return reduce<T, Sum, true>;
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == kBitAnd) return reduce<T, BitAnd, false>;
    if (reduction == kBitOr) return reduce<T, BitOr, false>;
    if (reduction == kBitXor) return reduce<T, BitXor, false>;
  }
  if constexpr (!kIsComplex<T>) {
    if (reduction == kMin) return reduce<T, Minimum, false>;
    if (reduction == kMax) return reduce<T, Maximum, false>;
  }
  return nullptr;
}

Kernel kernel_of(at::ScalarType dtype, ReduceOp reduction) {
  switch (dtype) {
    case at::kFloat:
      return kernel_of<float>(reduction);
    case at::kDouble:
      return kernel_of<double>(reduction);
    case at::kHalf:
      return kernel_of<c10::Half>(reduction);
    case at::kBFloat16:
      return kernel_of<c10::BFloat16>(reduction);
    case at::kByte:
      return kernel_of<std::uint8_t>(reduction);
    case at::kChar:
      return kernel_of<std::int8_t>(reduction);
    case at::kShort:
      return kernel_of<std::int16_t>(reduction);
    case at::kInt:
      return kernel_of<std::int32_t>(reduction);
    case at::kLong:
      return kernel_of<std::int64_t>(reduction);
    case at::kBool:
      return kernel_of<bool>(reduction);
    case at::kComplexFloat:
      return kernel_of<std::complex<float>>(reduction);
    case at::kComplexDouble:
      return kernel_of<std::complex<double>>(reduction);
    default:
      return nullptr;
  }
}

}  // namespace

Kernel find_kernel(at::ScalarType dtype, ReduceOp reduction) {
  if (Kernel kernel = kernel_of(dtype, reduction)) return kernel;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("the {} of {} values is not supported: averages need a floating-point or complex dtype, "
                  "minima and maxima one with an order, bitwise reductions integers or bools, and "
                  "ComplexHalf and quantized tensors cannot be "
                  "reduced; convert the tensor first",
                  to_string(reduction), c10::toString(dtype)));
}

}  // namespace torchspan::collective
