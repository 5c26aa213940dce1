#pragma once
// Types that can be sent, and how to make a type sendable. Includes no torch/nn.
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/detail/wire/codec.h>
#include <torchspan/detail/wire/containers.h>
#include <torchspan/detail/wire/torch_types.h>

namespace torchspan {

/// Serialization of a type; the customization point. A specialization has three static functions:
/// - `std::string name()`: the same string wherever the encoding means the same;
/// - `void encode(wire::Encoder&, const T&)`, by wire::encode() of each part;
/// - `T decode(wire::Decoder&)`, by wire::decode<Part>(): any bytes give a T or throw Error{kInvalid}.
/// WireStruct implements them for a plain struct. Numbers, enumerations, strings, standard containers, the
/// types of LibTorch that docs/wire.md lists, and Error have one.
template <class T>
struct Wire;

/// A string literal as a template argument.
template <std::size_t kSize>
struct FixedString {
  consteval FixedString(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
  constexpr std::string_view view() const { return {text, kSize - 1}; }
  char text[kSize];
};

/// Makes a plain, default-constructible struct sendable, member by member in the given order. The member
/// types are part of its wire name, so different versions of a struct do not match. Place it in the global
/// namespace:
///   template <> struct torchspan::Wire<Batch> : torchspan::WireStruct<Batch, "Batch", &Batch::data,
///   &Batch::instance> {};
template <class T, FixedString kName, auto... kMembers>
struct WireStruct {
  template <class... Enclosing>
  static std::string name() {
    std::string text(kName.view());
    if constexpr (!(std::is_same_v<T, Enclosing> || ...)) {
      text += '{';
      std::string_view comma;
      ((text.append(comma).append(wire::type_name<Member<kMembers>, Enclosing..., T>()), comma = ", "), ...);
      text += '}';
    }
    return text;
  }
  static void encode(wire::Encoder& encoder, const T& value) {
    (wire::encode(encoder, value.*kMembers), ...);
  }
  static T decode(wire::Decoder& decoder) {
    T value{};
    ((value.*kMembers = wire::decode<Member<kMembers>>(decoder)), ...);
    return value;
  }

 private:
  template <auto kMember>
  using Member = std::remove_cvref_t<decltype(std::declval<T&>().*kMember)>;
};

template <>
struct Wire<RemoteFrame> : WireStruct<RemoteFrame, "RemoteFrame", &RemoteFrame::worker, &RemoteFrame::call,
                                      &RemoteFrame::type, &RemoteFrame::text> {};

/// An Error with all its parts. A kind unknown to this program keeps its number.
template <>
struct Wire<Error> {
  static std::string name() { return "Error"; }
  static void encode(wire::Encoder& encoder, const Error& error);
  static Error decode(wire::Decoder& decoder);
};

}  // namespace torchspan
