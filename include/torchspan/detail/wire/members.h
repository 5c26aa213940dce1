#pragma once
#include <tuple>
#include <type_traits>

namespace torchspan::wire {

/// References to the members of a plain struct without bases, in the order of their declaration.
template <class T>
auto members_of(T& value) {
  using Struct = std::remove_const_t<T>;
  if constexpr (requires { Struct{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}; }) {
    static_assert(sizeof(T) == 0, "this struct has more than ten members: list them (WireStruct)");
  } else if constexpr (requires { Struct{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}}; }) {
    auto& [a, b, c, d, e, f, g, h, i, j] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (requires { Struct{{}, {}, {}, {}, {}, {}, {}, {}, {}}; }) {
    auto& [a, b, c, d, e, f, g, h, i] = value;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (requires { Struct{{}, {}, {}, {}, {}, {}, {}, {}}; }) {
    auto& [a, b, c, d, e, f, g, h] = value;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (requires { Struct{{}, {}, {}, {}, {}, {}, {}}; }) {
    auto& [a, b, c, d, e, f, g] = value;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (requires { Struct{{}, {}, {}, {}, {}, {}}; }) {
    auto& [a, b, c, d, e, f] = value;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (requires { Struct{{}, {}, {}, {}, {}}; }) {
    auto& [a, b, c, d, e] = value;
    return std::tie(a, b, c, d, e);
  } else if constexpr (requires { Struct{{}, {}, {}, {}}; }) {
    auto& [a, b, c, d] = value;
    return std::tie(a, b, c, d);
  } else if constexpr (requires { Struct{{}, {}, {}}; }) {
    auto& [a, b, c] = value;
    return std::tie(a, b, c);
  } else if constexpr (requires { Struct{{}, {}}; }) {
    auto& [a, b] = value;
    return std::tie(a, b);
  } else if constexpr (!std::is_empty_v<Struct>) {
    auto& [a] = value;
    return std::tie(a);
  } else {
    return std::tuple<>();
  }
}

}  // namespace torchspan::wire
