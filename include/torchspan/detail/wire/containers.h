#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <torchspan/detail/wire/codec.h>

namespace torchspan {
namespace wire {

[[noreturn]] void throw_duplicate_key(const std::string& map_name);
[[noreturn]] void throw_bad_alternative(std::size_t index, const std::string& variant_name);

/// Returns `value` if it is a number within the bounds; otherwise throws Error{kInvalid}.
long double check_duration(long double value, long double least, long double most);

/// "head<A, B>".
template <class... Ts, class... Enclosing>
std::string template_name(std::string head, std::tuple<Enclosing...>*) {
  head += '<';
  std::string_view comma;
  ((head.append(comma).append(type_name<Ts, Enclosing...>()), comma = ", "), ...);
  return head += '>';
}

/// Encoding of std::optional and similar types: a byte 0, or a byte 1 and the value.
template <class Optional, class T>
struct OptionalWire {
  template <class... Enclosing>
  static std::string name() {
    return "optional<" + type_name<T, Enclosing...>() + ">";
  }
  static void encode(Encoder& encoder, const Optional& value) {
    encoder.bytes().put(value.has_value());
    if (value.has_value()) wire::encode<T>(encoder, *value);
  }
  static Optional decode(Decoder& decoder) {
    if (!decode_flag(decoder)) return {};
    return Optional(wire::decode<T>(decoder));
  }
};

/// Encoding of maps: a count, then keys and values in map order; duplicate keys are rejected.
template <class Map>
struct MapWire {
  using Key = typename Map::key_type;
  using Value = typename Map::mapped_type;
  static void encode(Encoder& encoder, const Map& map) {
    encode_count(encoder, map.size());
    const std::size_t start = encoder.bytes().size();
    for (const auto& [key, value] : map) {
      wire::encode<Key>(encoder, key);
      wire::encode<Value>(encoder, value);
    }
    check_element_bytes(map.size(), encoder.bytes().size() - start);
  }
  static Map decode(Decoder& decoder) {
    Map map;
    for (std::size_t left = decoder.bytes().get_count(1); left > 0; --left) {
      Key key = wire::decode<Key>(decoder);
      const std::size_t before = map.size();
      map.emplace_hint(map.end(), std::move(key), wire::decode<Value>(decoder));
      if (map.size() == before) throw_duplicate_key(type_name<Map>());
    }
    return map;
  }
};

}  // namespace wire

/// A count, then the elements. Zero-size elements (Unit, empty structs) are rejected when encoded.
template <wire::Transferable T>
struct Wire<std::vector<T>> {
  template <class... Enclosing>
  static std::string name() {
    return "vector<" + wire::type_name<T, Enclosing...>() + ">";
  }
  static void encode(wire::Encoder& encoder, const std::vector<T>& value) {
    wire::encode_count(encoder, value.size());
    if constexpr (wire::kPlainBytes<T>) {
      encoder.bytes().put_bytes(std::as_bytes(std::span(value)));
    } else {
      const std::size_t start = encoder.bytes().size();
      for (const auto& element : value) wire::encode<T>(encoder, element);
      wire::check_element_bytes(value.size(), encoder.bytes().size() - start);
    }
  }
  static std::vector<T> decode(wire::Decoder& decoder) {
    ByteReader& bytes = decoder.bytes();
    if constexpr (wire::kPlainBytes<T>) {
      const std::size_t count = bytes.get_count(sizeof(T));
      BytesView raw = bytes.get_bytes(count * sizeof(T));
      std::vector<T> value(count);
      if (count > 0) std::memcpy(static_cast<void*>(value.data()), raw.data(), raw.size());
      return value;
    } else {
      const std::size_t count = bytes.get_count(1);
      std::vector<T> value;
      value.reserve(std::min(count, bytes.left() / sizeof(T) + 1));
      for (std::size_t i = 0; i < count; ++i) value.push_back(wire::decode<T>(decoder));
      return value;
    }
  }
};

/// The elements; the count is part of the type.
template <wire::Transferable T, std::size_t kCount>
struct Wire<std::array<T, kCount>> {
  using Array = std::array<T, kCount>;
  template <class... Enclosing>
  static std::string name() {
    return "array<" + wire::type_name<T, Enclosing...>() + ", " + std::to_string(kCount) + ">";
  }
  static void encode(wire::Encoder& encoder, const Array& value) {
    if constexpr (wire::kPlainBytes<T>) {
      encoder.bytes().put_bytes(std::as_bytes(std::span(value)));
    } else {
      for (const T& element : value) wire::encode<T>(encoder, element);
    }
  }
  static Array decode(wire::Decoder& decoder) {
    if constexpr (wire::kPlainBytes<T> && kCount > 0) {
      Array value;
      std::memcpy(static_cast<void*>(value.data()), decoder.bytes().get_bytes(sizeof value).data(),
                  sizeof value);
      return value;
    } else if constexpr (std::is_default_constructible_v<T>) {
      Array value;
      for (T& element : value) element = wire::decode<T>(decoder);
      return value;
    } else {
      return decode_each(decoder, std::make_index_sequence<kCount>());
    }
  }

 private:
  template <std::size_t... kIndex>
  static Array decode_each(wire::Decoder& decoder, std::index_sequence<kIndex...>) {
    return {(static_cast<void>(kIndex), wire::decode<T>(decoder))...};  // braces: left to right
  }
};

template <wire::Transferable First, wire::Transferable Second>
struct Wire<std::pair<First, Second>> {
  template <class... Enclosing>
  static std::string name() {
    return wire::template_name<First, Second>("pair", static_cast<std::tuple<Enclosing...>*>(nullptr));
  }
  static void encode(wire::Encoder& encoder, const std::pair<First, Second>& value) {
    wire::encode<First>(encoder, value.first);
    wire::encode<Second>(encoder, value.second);
  }
  static std::pair<First, Second> decode(wire::Decoder& decoder) {
    return std::pair<First, Second>{wire::decode<First>(decoder), wire::decode<Second>(decoder)};
  }
};

template <wire::Transferable... Ts>
struct Wire<std::tuple<Ts...>> {
  template <class... Enclosing>
  static std::string name() {
    return wire::template_name<Ts...>("tuple", static_cast<std::tuple<Enclosing...>*>(nullptr));
  }
  static void encode(wire::Encoder& encoder, const std::tuple<Ts...>& value) {
    std::apply([&](const Ts&... elements) { (wire::encode<Ts>(encoder, elements), ...); }, value);
  }
  static std::tuple<Ts...> decode(wire::Decoder& decoder) {
    return std::tuple<Ts...>{wire::decode<Ts>(decoder)...};  // braces: evaluated left to right
  }
};

template <wire::Transferable T>
struct Wire<std::optional<T>> : wire::OptionalWire<std::optional<T>, T> {};

template <wire::Transferable Key, wire::Transferable Value>
struct Wire<std::map<Key, Value>> : wire::MapWire<std::map<Key, Value>> {
  template <class... Enclosing>
  static std::string name() {
    return wire::template_name<Key, Value>("map", static_cast<std::tuple<Enclosing...>*>(nullptr));
  }
};

template <wire::Transferable Key, wire::Transferable Value>
struct Wire<std::unordered_map<Key, Value>> : wire::MapWire<std::unordered_map<Key, Value>> {
  template <class... Enclosing>
  static std::string name() {
    return wire::template_name<Key, Value>("unordered_map", static_cast<std::tuple<Enclosing...>*>(nullptr));
  }
};

/// The alternative's index in one byte, then its value.
template <wire::Transferable... Ts>
struct Wire<std::variant<Ts...>> {
  using Variant = std::variant<Ts...>;
  static_assert(sizeof...(Ts) <= 255);
  template <class... Enclosing>
  static std::string name() {
    return wire::template_name<Ts...>("variant", static_cast<std::tuple<Enclosing...>*>(nullptr));
  }
  static void encode(wire::Encoder& encoder, const Variant& value) {
    if (value.valueless_by_exception())
      wire::throw_bad_alternative(value.index(), wire::type_name<Variant>());
    encoder.bytes().put(static_cast<std::uint8_t>(value.index()));
    std::visit([&]<class T>(const T& alternative) { wire::encode<T>(encoder, alternative); }, value);
  }
  static Variant decode(wire::Decoder& decoder) {
    return decode_alternative<0>(decoder, decoder.bytes().get<std::uint8_t>());
  }

 private:
  template <std::size_t kIndex>
  static Variant decode_alternative(wire::Decoder& decoder, std::size_t index) {
    if constexpr (kIndex == sizeof...(Ts)) {
      wire::throw_bad_alternative(index, wire::type_name<Variant>());
    } else {
      if (index != kIndex) return decode_alternative<kIndex + 1>(decoder, index);
      using T = std::variant_alternative_t<kIndex, Variant>;
      return Variant(std::in_place_index<kIndex>, wire::decode<T>(decoder));
    }
  }
};

template <>
struct Wire<std::monostate> {
  static std::string name() { return "monostate"; }
  static void encode(wire::Encoder&, std::monostate) {}
  static std::monostate decode(wire::Decoder&) { return {}; }
};

/// 64-bit nanoseconds for any unit; throws Error{kInvalid} on overflow on either side. The receiver rounds
/// coarser units toward zero.
template <class Rep, class Period>
struct Wire<std::chrono::duration<Rep, Period>> {
  using Time = std::chrono::duration<Rep, Period>;
  using Nanoseconds = std::chrono::duration<std::int64_t, std::nano>;
  static std::string name() { return "duration"; }
  static void encode(wire::Encoder& encoder, Time value) {
    encoder.bytes().put(convert<Nanoseconds>(value).count());
  }
  static Time decode(wire::Decoder& decoder) {
    return convert<Time>(Nanoseconds(decoder.bytes().get<std::int64_t>()));
  }

 private:
  template <class To, class From>
  static To convert(From from) {
    if constexpr (std::is_same_v<To, From>) {
      return from;
    } else {
      using Wide = std::chrono::duration<long double, typename To::period>;
      const long double least = To::min().count(), most = To::max().count();
      return To(static_cast<typename To::rep>(wire::check_duration(Wide(from).count(), least, most)));
    }
  }
};

}  // namespace torchspan
