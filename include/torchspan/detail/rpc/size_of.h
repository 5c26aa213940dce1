#pragma once
#include <concepts>
#include <cstdint>
#include <optional>
#include <ranges>
#include <string>
#include <type_traits>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::rpc {

using KnownSize = std::optional<std::uint64_t>;

inline KnownSize size_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  if (tensor.layout() != at::kStrided) return std::nullopt;
  return static_cast<std::uint64_t>(tensor.numel()) * static_cast<std::uint64_t>(tensor.element_size());
}

template <class T>
KnownSize size_of(const T& value);

template <class T>
concept HasParameters = requires(const T& module) {
  { *module.parameters().begin() } -> std::convertible_to<at::Tensor>;
  { *module.buffers().begin() } -> std::convertible_to<at::Tensor>;
};

/// Sum over a range, if all its elements have a known size.
template <class Range>
KnownSize size_of_all(const Range& range) {
  std::uint64_t sum = 0;
  for (const auto& element : range) {
    const KnownSize one = size_of(element);
    if (!one) return std::nullopt;
    sum += *one;
  }
  return sum;
}

template <class T>
inline constexpr bool kPair = false;
template <class A, class B>
inline constexpr bool kPair<std::pair<A, B>> = true;

/// Size of a value's data in bytes, for listings. Known for tensors, numbers, strings, containers of those,
/// and modules (parameters and buffers, also behind a holder).
template <class T>
KnownSize size_of(const T& value) {
  if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    return sizeof(T);
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    return value.isTensor() ? size_of(value.toTensor()) : KnownSize();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value.size();
  } else if constexpr (HasParameters<T>) {
    const KnownSize parameters = size_of_all(value.parameters()), buffers = size_of_all(value.buffers());
    return parameters && buffers ? KnownSize(*parameters + *buffers) : std::nullopt;
  } else if constexpr (requires { requires HasParameters<std::remove_cvref_t<decltype(*value)>>; }) {
    return value ? size_of(*value) : KnownSize(0);
  } else if constexpr (kPair<T>) {
    const KnownSize first = size_of(value.first), second = size_of(value.second);
    return first && second ? KnownSize(*first + *second) : std::nullopt;
  } else if constexpr (std::ranges::sized_range<const T>) {
    using Element = std::ranges::range_value_t<const T>;
    if constexpr (std::is_arithmetic_v<Element>) return std::ranges::size(value) * sizeof(Element);
    if constexpr (!std::is_same_v<Element, T>) return size_of_all(value);
    return std::nullopt;
  } else {
    return std::nullopt;
  }
}

}  // namespace torchspan::rpc
