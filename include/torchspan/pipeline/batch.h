#pragma once
// Batch: the tensors of a micro-batch, and which types of programs are one. Includes no torch/nn.
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Optional.h>

#include <torchspan/core/error.h>

namespace torchspan::pipeline {

/// What a layer passes to the next for one micro-batch: one tensor, or a tuple of members. A member is a
/// tensor, a number, a bool or None. Cheap to copy; tensors are shared.
struct Batch {
  std::vector<c10::IValue> members;
  bool tuple = false;                 ///< a tuple, even with one member
  std::vector<std::uint8_t> unsplit;  ///< by member; 1: not split; missing entries are 0

  Batch() = default;
  Batch(at::Tensor tensor) { members.emplace_back(std::move(tensor)); }
  explicit Batch(std::vector<c10::IValue> all) : members(std::move(all)), tuple(true) {}
  std::size_t size() const { return members.size(); }
  /// Marks a tensor that has no batch dimension. In an input or a target every micro-batch gets all of it;
  /// in an output the micro-batches' tensors are stacked. The mark is sent with the batch.
  Batch& mark_unsplit(std::size_t member);
  bool is_unsplit(std::size_t member) const { return member < unsplit.size() && unsplit[member] != 0; }
  /// The tensor of a single-tensor batch; otherwise throws Error{kInvalid}.
  const at::Tensor& tensor() const;
};

namespace batch_detail {
/// Throws Error{kInvalid}: a member has a type that the layer does not accept.
[[noreturn]] void refuse(const char* wanted, const c10::IValue& there);
}  // namespace batch_detail

/// Converts between a C++ type and a batch member. An undefined tensor is None.
template <class T>
struct Member {
  static c10::IValue from(T value) { return c10::IValue(std::move(value)); }
  static T to(const c10::IValue& value) { return value.to<T>(); }
};
template <>
struct Member<bool> {
  static c10::IValue from(bool value) { return c10::IValue(value); }
  static bool to(const c10::IValue& value) {
    if (!value.isBool()) batch_detail::refuse("a bool", value);
    return value.toBool();
  }
};
template <>
struct Member<at::Tensor> {
  static c10::IValue from(at::Tensor value) {
    return value.defined() ? c10::IValue(std::move(value)) : c10::IValue();
  }
  static at::Tensor to(const c10::IValue& value) {
    if (value.isNone()) return {};
    if (!value.isTensor()) batch_detail::refuse("a tensor", value);
    return value.toTensor();
  }
};
template <class T>
struct OptionalMember {
  using Value = typename T::value_type;
  static c10::IValue from(T value) { return value ? Member<Value>::from(std::move(*value)) : c10::IValue(); }
  static T to(const c10::IValue& value) { return value.isNone() ? T() : T(Member<Value>::to(value)); }
};
template <class T>
struct Member<std::optional<T>> : OptionalMember<std::optional<T>> {};
template <class T>
requires(!std::is_same_v<c10::optional<T>, std::optional<T>>) struct Member<c10::optional<T>>
    : OptionalMember<c10::optional<T>> {
};
template <std::integral T>
requires(!std::is_same_v<T, bool>) struct Member<T> {
  static c10::IValue from(T value) { return c10::IValue(static_cast<std::int64_t>(value)); }
  static T to(const c10::IValue& value) {
    if (!value.isInt()) batch_detail::refuse("an integer", value);
    return static_cast<T>(value.toInt());
  }
};
template <std::floating_point T>
struct Member<T> {
  static c10::IValue from(T value) { return c10::IValue(static_cast<double>(value)); }
  static T to(const c10::IValue& value) {
    if (!value.isDouble()) batch_detail::refuse("a floating-point number", value);
    return static_cast<T>(value.toDouble());
  }
};

/// A tensor that is not split into micro-batches (Batch::mark_unsplit): a member of make_batch(), or of a
/// layer's parameters or result.
struct Unsplit {
  at::Tensor tensor;
};
template <>
struct Member<Unsplit> {
  static c10::IValue from(Unsplit value) { return Member<at::Tensor>::from(std::move(value.tensor)); }
  static Unsplit to(const c10::IValue& value) { return {Member<at::Tensor>::to(value)}; }
};

namespace batch_detail {
template <class T>
void append(Batch& batch, T value) {
  if constexpr (std::is_same_v<T, Unsplit>) batch.mark_unsplit(batch.size());
  batch.members.push_back(Member<T>::from(std::move(value)));
}
}  // namespace batch_detail

/// Converts between a C++ type and a whole batch: a layer's only parameter, or its result. Specialize it
/// for your struct.
template <class T>
struct BatchOf {
  static Batch from(T value) {
    Batch batch;
    batch_detail::append<T>(batch, std::move(value));
    return batch;
  }
  static T to(const Batch& batch) {
    check(batch.size(), 1);
    return Member<T>::to(batch.members.front());
  }
  static void check(std::size_t there, std::size_t wanted) {
    if (there != wanted) {
      throw Error(ErrorKind::kInvalid, "the layer takes " + std::to_string(wanted) +
                                           " values, but its input has " + std::to_string(there));
    }
  }
};
template <>
struct BatchOf<Batch> {
  static Batch from(Batch value) { return value; }
  static Batch to(const Batch& batch) { return batch; }
};
template <>
struct BatchOf<std::vector<at::Tensor>> {
  static Batch from(std::vector<at::Tensor> values) {
    Batch batch{std::vector<c10::IValue>()};
    for (at::Tensor& value : values) batch.members.push_back(Member<at::Tensor>::from(std::move(value)));
    return batch;
  }
  static std::vector<at::Tensor> to(const Batch& batch) {
    std::vector<at::Tensor> values;
    for (const c10::IValue& member : batch.members) values.push_back(Member<at::Tensor>::to(member));
    return values;
  }
};
template <class... T>
struct BatchOf<std::tuple<T...>> {
  static Batch from(std::tuple<T...> values) {
    return std::apply(
        [](auto&... value) {
          Batch batch{std::vector<c10::IValue>()};
          (batch_detail::append<T>(batch, std::move(value)), ...);
          return batch;
        },
        values);
  }
  static std::tuple<T...> to(const Batch& batch) {
    BatchOf<Batch*>::check(batch.size(), sizeof...(T));
    return members_of(batch, std::index_sequence_for<T...>());
  }

 private:
  template <std::size_t... I>
  static std::tuple<T...> members_of(const Batch& batch, std::index_sequence<I...>) {
    return std::tuple<T...>{Member<T>::to(batch.members[I])...};
  }
};
template <class A, class B>
struct BatchOf<std::pair<A, B>> {
  static Batch from(std::pair<A, B> values) {
    return BatchOf<std::tuple<A, B>>::from({std::move(values.first), std::move(values.second)});
  }
  static std::pair<A, B> to(const Batch& batch) {
    auto [a, b] = BatchOf<std::tuple<A, B>>::to(batch);
    return {std::move(a), std::move(b)};
  }
};

/// Makes a tuple of tensors, numbers and the like: `make_batch(tokens, Unsplit{mask})`.
template <class... T>
Batch make_batch(T... values) {
  return BatchOf<std::tuple<T...>>::from({std::move(values)...});
}

}  // namespace torchspan::pipeline
