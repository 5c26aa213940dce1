#pragma once
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::data_parallel {

/// See data_parallel.h.
template <class T>
struct OutputTensors;

template <class T>
concept HasOutputTensors = requires {
  sizeof(OutputTensors<T>);
};

/// Calls visitor(at::Tensor&) for every tensor in `value`; the visitor may replace it.
template <class T, class Visitor>
void visit_tensors(T& value, Visitor& visitor) {
  static_assert(HasOutputTensors<T>,
                "DistributedDataParallel cannot see the tensors in this type: specialize "
                "torchspan::data_parallel::OutputTensors for it");
  if constexpr (HasOutputTensors<T>) OutputTensors<T>::visit(value, visitor);
}

template <>
struct OutputTensors<at::Tensor> {
  static void visit(at::Tensor& value, auto& visitor) { visitor(value); }
};

/// No tensors.
template <class T>
requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) struct OutputTensors<T> {
  static void visit(T&, auto&) {}
};
template <>
struct OutputTensors<std::string> {
  static void visit(std::string&, auto&) {}
};
template <>
struct OutputTensors<std::monostate> {
  static void visit(std::monostate&, auto&) {}
};

template <class T>
struct OutputTensors<std::vector<T>> {
  static void visit(std::vector<T>& values, auto& visitor) {
    if constexpr (!std::is_same_v<T, bool>) {
      for (T& value : values) visit_tensors(value, visitor);
    }
  }
};
template <class T, std::size_t N>
struct OutputTensors<std::array<T, N>> {
  static void visit(std::array<T, N>& values, auto& visitor) {
    for (T& value : values) visit_tensors(value, visitor);
  }
};
template <class... T>
struct OutputTensors<std::tuple<T...>> {
  static void visit(std::tuple<T...>& values, auto& visitor) {
    std::apply([&](auto&... value) { (visit_tensors(value, visitor), ...); }, values);
  }
};
template <class A, class B>
struct OutputTensors<std::pair<A, B>> {
  static void visit(std::pair<A, B>& values, auto& visitor) {
    visit_tensors(values.first, visitor);
    visit_tensors(values.second, visitor);
  }
};
template <class K, class V>
struct OutputTensors<std::map<K, V>> {
  static void visit(std::map<K, V>& values, auto& visitor) {
    for (auto& [key, value] : values) visit_tensors(value, visitor);
  }
};
/// In key order, which is the same on all ranks.
template <class K, class V>
struct OutputTensors<std::unordered_map<K, V>> {
  static void visit(std::unordered_map<K, V>& values, auto& visitor) {
    std::map<K, V*> sorted;
    for (auto& [key, value] : values) sorted.emplace(key, &value);
    for (auto& [key, value] : sorted) visit_tensors(*value, visitor);
  }
};
template <class T>
struct OutputTensors<std::optional<T>> {
  static void visit(std::optional<T>& value, auto& visitor) {
    if (value) visit_tensors(*value, visitor);
  }
};
template <class T>
struct OutputTensors<std::shared_ptr<T>> {
  static void visit(std::shared_ptr<T>& value, auto& visitor) {
    if (value) visit_tensors(*value, visitor);
  }
};
template <class... T>
struct OutputTensors<std::variant<T...>> {
  static void visit(std::variant<T...>& value, auto& visitor) {
    std::visit([&](auto& held) { visit_tensors(held, visitor); }, value);
  }
};

}  // namespace torchspan::data_parallel
