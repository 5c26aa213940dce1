#pragma once
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include <torchspan/core/future.h>
#include <torchspan/detail/wire/payload.h>

namespace torchspan {

/// Serialization of a type: see <torchspan/wire.h>.
template <class T>
struct Wire;

namespace wire {

/// Types that can be sent: Wire<T> exists.
template <class T>
concept Transferable = requires(Encoder& encoder, Decoder& decoder, const T& value) {
  Wire<T>::encode(encoder, value);
  { Wire<T>::decode(decoder) } -> std::same_as<T>;
};

/// Types whose wire bytes are their memory, so that a vector of them is copied at once.
template <class T>
inline constexpr bool kPlainBytes =
    (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) || std::is_same_v<T, std::byte>;

/// Wire name of a type, such as "int64", "vector<Tensor>" or "Batch{Tensor, int64}"; the same in all
/// processes and compilers. `Enclosing` lists the structs being named, to terminate on recursive types.
template <class T, class... Enclosing>
std::string type_name() {
  if constexpr (requires { Wire<T>::template name<Enclosing...>(); }) {
    return Wire<T>::template name<Enclosing...>();
  } else {
    return Wire<T>::name();
  }
}

/// Appends `value`. Throws Error{kInvalid} for what no receiver could read (nested too deep, 2^32
/// elements).
template <class T>
void encode(Encoder& encoder, const T& value) {
  static_assert(Transferable<T>,
                "this type cannot be sent: specialize torchspan::Wire for it (docs/wire.md)");
  if constexpr (std::is_arithmetic_v<T>) {
    Wire<T>::encode(encoder, value);
  } else {
    NestingScope scope(encoder);
    Wire<T>::encode(encoder, value);
  }
}

/// Reads the next value, or throws Error{kInvalid}.
template <class T>
T decode(Decoder& decoder) {
  static_assert(Transferable<T>,
                "this type cannot be sent: specialize torchspan::Wire for it (docs/wire.md)");
  if constexpr (std::is_arithmetic_v<T>) {
    return Wire<T>::decode(decoder);
  } else {
    NestingScope scope(decoder);
    return Wire<T>::decode(decoder);
  }
}

/// Encodes values in order into one payload.
template <class... Ts>
Payload to_payload(const Ts&... values) {
  Payload payload;
  Encoder encoder(payload);
  (encode(encoder, values), ...);
  encoder.finish();
  return payload;
}

/// Decodes the payload's only value; throws Error{kInvalid} for trailing bytes.
template <class T>
T from_payload(Payload& payload) {
  Decoder decoder(payload);
  T value = decode<T>(decoder);
  decoder.expect_end();
  return value;
}

/// 64-bit digest of a string (XXH3), the same in every process, for signatures and type tags. Not
/// cryptographic.
std::uint64_t digest(std::string_view text);

/// Digest of a type's name, as in Handle::type_tag.
template <class T>
std::uint64_t type_tag() {
  return digest(type_name<T>());
}

/// Reads a byte that must be 0 or 1; otherwise throws Error{kInvalid}.
bool decode_flag(Decoder& decoder);

/// Writes an element count; throws Error{kInvalid} from 2^32 on.
void encode_count(Encoder& encoder, std::size_t count);

/// Throws Error{kInvalid} if `count` elements took fewer than `count` bytes: readers accept a count only if
/// at least as many bytes follow.
void check_element_bytes(std::size_t count, std::size_t bytes);

}  // namespace wire

/// bool, and every standard integer and floating-point type of fixed width: little-endian bytes.
template <class T>
requires(std::is_arithmetic_v<T> && sizeof(T) <= 8 && !std::is_same_v<T, wchar_t>) struct Wire<T> {
  static std::string name() {
    if constexpr (std::is_same_v<T, bool>) return "bool";
    if constexpr (std::is_same_v<T, char>) return "char";
    const char* kind = std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
    return kind + std::to_string(8 * sizeof(T));
  }
  static void encode(wire::Encoder& encoder, T value) { encoder.bytes().put(value); }
  static T decode(wire::Decoder& decoder) {
    if constexpr (std::is_same_v<T, bool>) {
      return wire::decode_flag(decoder);
    } else {
      return decoder.bytes().get<T>();
    }
  }
};

/// The enumeration's number. Receivers must expect numbers that their program does not know.
template <class T>
requires std::is_enum_v<T>
struct Wire<T> {
  using Number = std::underlying_type_t<T>;
  static std::string name() { return "enum<" + wire::type_name<Number>() + ">"; }
  static void encode(wire::Encoder& encoder, T value) { wire::encode(encoder, static_cast<Number>(value)); }
  static T decode(wire::Decoder& decoder) { return static_cast<T>(wire::decode<Number>(decoder)); }
};

/// Text or bytes, up to 4 GiB.
template <>
struct Wire<std::string> {
  static std::string name() { return "string"; }
  static void encode(wire::Encoder& encoder, const std::string& value) { encoder.bytes().put_string(value); }
  static std::string decode(wire::Decoder& decoder) { return decoder.bytes().get_string(); }
};

/// Result of a call that returns nothing; takes no bytes.
template <>
struct Wire<Unit> {
  static std::string name() { return "void"; }
  static void encode(wire::Encoder&, Unit) {}
  static Unit decode(wire::Decoder&) { return {}; }
};

}  // namespace torchspan
