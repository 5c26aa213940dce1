#pragma once
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/Optional.h>
#include <c10/util/complex.h>

#include <torchspan/detail/wire/containers.h>

namespace torchspan {
namespace wire {

template <>
inline constexpr bool kPlainBytes<c10::Half> = true;
template <>
inline constexpr bool kPlainBytes<c10::BFloat16> = true;
template <>
inline constexpr bool kPlainBytes<c10::complex<float>> = true;
template <>
inline constexpr bool kPlainBytes<c10::complex<double>> = true;

/// Wire code of a dtype; throws Error{kUnsupported} for one without a code (listed in docs/wire.md).
std::uint8_t dtype_code(at::ScalarType dtype);
/// Dtype of a wire code. Throws Error{kUnsupported} if this build of LibTorch lacks the dtype,
/// Error{kInvalid} for an unknown code.
at::ScalarType dtype_from_code(std::uint8_t code);

}  // namespace wire

/// An index into the payload's tensor table.
template <>
struct Wire<at::Tensor> {
  static std::string name() { return "Tensor"; }
  static void encode(wire::Encoder& encoder, const at::Tensor& value) { encoder.tensor(value); }
  static at::Tensor decode(wire::Decoder& decoder) { return decoder.tensor(); }
};

template <>
struct Wire<c10::Half> {
  static std::string name() { return "Half"; }
  static void encode(wire::Encoder& encoder, c10::Half value) { encoder.bytes().put(value.x); }
  static c10::Half decode(wire::Decoder& decoder) {
    return c10::Half(decoder.bytes().get<std::uint16_t>(), c10::Half::from_bits());
  }
};

template <>
struct Wire<c10::BFloat16> {
  static std::string name() { return "BFloat16"; }
  static void encode(wire::Encoder& encoder, c10::BFloat16 value) { encoder.bytes().put(value.x); }
  static c10::BFloat16 decode(wire::Decoder& decoder) {
    return c10::BFloat16(decoder.bytes().get<std::uint16_t>(), c10::BFloat16::from_bits());
  }
};

template <class T>
requires(std::is_same_v<T, float> || std::is_same_v<T, double>) struct Wire<c10::complex<T>> {
  static std::string name() { return "complex<" + wire::type_name<T>() + ">"; }
  static void encode(wire::Encoder& encoder, const c10::complex<T>& value) {
    encoder.bytes().put(value.real());
    encoder.bytes().put(value.imag());
  }
  static c10::complex<T> decode(wire::Decoder& decoder) {
    const T real = decoder.bytes().get<T>();
    return c10::complex<T>(real, decoder.bytes().get<T>());
  }
};

/// A number; stays a bool, an integer, a double or a complex number.
template <>
struct Wire<c10::Scalar> {
  static std::string name() { return "Scalar"; }
  static void encode(wire::Encoder& encoder, const c10::Scalar& value);
  static c10::Scalar decode(wire::Decoder& decoder);
};

template <>
struct Wire<at::ScalarType> {
  static std::string name() { return "ScalarType"; }
  static void encode(wire::Encoder& encoder, at::ScalarType value);
  static at::ScalarType decode(wire::Decoder& decoder);
};

/// A device string, "cuda:0". Whether the receiver has the device is not checked.
template <>
struct Wire<c10::Device> {
  static std::string name() { return "Device"; }
  static void encode(wire::Encoder& encoder, const c10::Device& value);
  static c10::Device decode(wire::Decoder& decoder);
};

/// LibTorch's optional, where it differs from std::optional.
template <wire::Transferable T>
requires(!std::is_same_v<c10::optional<T>, std::optional<T>>) struct Wire<c10::optional<T>>
    : wire::OptionalWire<c10::optional<T>, T> {
};

/// A TorchScript value: None, bool, int, double, complex, string, Tensor, Device, and lists, tuples and
/// dicts of them, with the element types of lists and dicts. Field names of tuples are dropped. Encoding
/// anything else (objects, futures, generators, streams, …) throws Error{kUnsupported}.
template <>
struct Wire<c10::IValue> {
  static std::string name() { return "IValue"; }
  static void encode(wire::Encoder& encoder, const c10::IValue& value);
  static c10::IValue decode(wire::Decoder& decoder);
};

}  // namespace torchspan
