#pragma once
// Types that can be sent, and how to make a type sendable. Includes no torch/nn.
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include <torchspan/core/error.h>
#include <torchspan/detail/wire/codec.h>
#include <torchspan/detail/wire/containers.h>
#include <torchspan/detail/wire/members.h>
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

/// Makes a plain, default-constructible struct sendable: the listed members in this order or, without a list, all of them
/// as declared. The member types are part of its wire name, so different versions of a struct do not match. Place it in
/// the global namespace:
///   template <> struct torchspan::Wire<Batch> : torchspan::WireStruct<Batch, "Batch", &Batch::data> {};
template <class T, FixedString kName, auto... kMembers>
struct WireStruct {
  template <class... Enclosing>
  static std::string name() {
    std::string text(kName.view());
    if constexpr (!(std::is_same_v<T, Enclosing> || ...)) {
      text += '{';
      std::string_view comma;
      T value{};
      std::apply(
          [&]<class... Member>(const Member&...) {
            ((text.append(comma).append(wire::type_name<Member, Enclosing..., T>()), comma = ", "), ...);
          },
          sent(value));
      text += '}';
    }
    return text;
  }
  static void encode(wire::Encoder& encoder, const T& value) {
    std::apply([&](const auto&... members) { (wire::encode(encoder, members), ...); }, sent(value));
  }
  static T decode(wire::Decoder& decoder) {
    T value{};
    std::apply([&]<class... Member>(Member&... members) { ((members = wire::decode<Member>(decoder)), ...); },
               sent(value));
    return value;
  }

 private:
  template <class Struct>
  static auto sent(Struct& value) {
    if constexpr (sizeof...(kMembers) == 0) {
      return wire::members_of(value);
    } else {
      return std::tie(value.*kMembers...);
    }
  }
};

namespace wire {
template <class T>
concept StatesItsName = requires {
  T::kWireName;
};
}  // namespace wire

/// A struct that states its wire name is sent with all its members; no specialization is necessary:
///   struct Batch { static constexpr FixedString kWireName = "Batch"; at::Tensor data; };
template <wire::StatesItsName T>
struct Wire<T> : WireStruct<T, T::kWireName> {};

template <>
struct Wire<RemoteFrame> : WireStruct<RemoteFrame, "RemoteFrame"> {};

/// An Error with all its parts. A kind unknown to this program keeps its number.
template <>
struct Wire<Error> {
  static std::string name() { return "Error"; }
  static void encode(wire::Encoder& encoder, const Error& error);
  static Error decode(wire::Decoder& decoder);
};

}  // namespace torchspan
