#include <array>
#include <fmt/format.h>

#include <torch/version.h>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"
#include "device/api/devices.h"
#include "device/api/dtypes.h"
#include "wire/compat.h"

namespace torchspan {
namespace wire {
namespace {

struct Dtype {
  std::uint8_t code;
  const char* name;
  /// Undefined if this build does not have the type.
  at::ScalarType type;
};

constexpr std::uint8_t kUndefinedCode = 255;

/// The numbers of docs/wire.md; they never change, even if LibTorch changes its own.
constexpr std::array kDtypes{
    Dtype{0, "uint8", at::kByte},
    Dtype{1, "int8", at::kChar},
    Dtype{2, "int16", at::kShort},
    Dtype{3, "int32", at::kInt},
    Dtype{4, "int64", at::kLong},
    Dtype{5, "float16", at::kHalf},
    Dtype{6, "float32", at::kFloat},
    Dtype{7, "float64", at::kDouble},
    Dtype{8, "complex32", at::kComplexHalf},
    Dtype{9, "complex64", at::kComplexFloat},
    Dtype{10, "complex128", at::kComplexDouble},
    Dtype{11, "bool", at::kBool},
    Dtype{12, "qint8", at::kQInt8},
    Dtype{13, "quint8", at::kQUInt8},
    Dtype{14, "qint32", at::kQInt32},
    Dtype{15, "bfloat16", at::kBFloat16},
    Dtype{16, "quint4x2", at::kQUInt4x2},
    Dtype{17, "quint2x4", at::kQUInt2x4},
    Dtype{23, "float8_e5m2", device::kFloat8e5m2},
    Dtype{24, "float8_e4m3fn", device::kFloat8e4m3},
    Dtype{25, "float8_e5m2fnuz", device::kFloat8e5m2fnuz},
    Dtype{26, "float8_e4m3fnuz", device::kFloat8e4m3fnuz},
    Dtype{27, "uint16", device::kUInt16},
    Dtype{28, "uint32", device::kUInt32},
    Dtype{29, "uint64", device::kUInt64},
    Dtype{44, "float8_e8m0fnu", device::kFloat8e8m0},
    Dtype{45, "float4_e2m1fn_x2", device::kFloat4e2m1x2},
};

}  // namespace

std::uint8_t dtype_code(at::ScalarType dtype) {
  if (dtype == at::ScalarType::Undefined) return kUndefinedCode;
  for (const Dtype& known : kDtypes) {
    if (known.type == dtype) return known.code;
  }
  throw Error(ErrorKind::kUnsupported,
              fmt::format("dtype {} cannot be sent; convert the tensor first", c10::toString(dtype)));
}

at::ScalarType dtype_from_code(std::uint8_t code) {
  if (code == kUndefinedCode) return at::ScalarType::Undefined;
  for (const Dtype& known : kDtypes) {
    if (known.code != code) continue;
    if (known.type != device::kAbsent) return known.type;
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("dtype {} is unknown to LibTorch {}; use a newer LibTorch here or convert the tensor "
                    "before it is sent",
                    known.name, TORCH_VERSION));
  }
  throw_invalid("{} is not the number of a dtype", code);
}

}  // namespace wire

namespace {
enum class ScalarTag : std::uint8_t { kBool = 1, kInt = 2, kDouble = 3, kComplex = 4 };
}

void Wire<c10::Scalar>::encode(wire::Encoder& encoder, const c10::Scalar& value) {
  ByteWriter& bytes = encoder.bytes();
  if (value.isSymbolic()) {
    throw Error(ErrorKind::kUnsupported, "a symbolic number cannot be sent; send its value");
  }
  if (value.isBoolean()) {
    bytes.put(ScalarTag::kBool);
    bytes.put(value.toBool());
  } else if (value.isFloatingPoint()) {
    bytes.put(ScalarTag::kDouble);
    bytes.put(value.toDouble());
  } else if (value.isComplex()) {
    bytes.put(ScalarTag::kComplex);
    wire::encode(encoder, value.toComplexDouble());
  } else {
    bytes.put(ScalarTag::kInt);
    bytes.put(value.toLong());
  }
}

c10::Scalar Wire<c10::Scalar>::decode(wire::Decoder& decoder) {
  const auto tag = decoder.bytes().get<ScalarTag>();
  switch (tag) {
    case ScalarTag::kBool:
      return wire::decode<bool>(decoder);
    case ScalarTag::kInt:
      return wire::decode<std::int64_t>(decoder);
    case ScalarTag::kDouble:
      return wire::decode<double>(decoder);
    case ScalarTag::kComplex:
      return wire::decode<c10::complex<double>>(decoder);
  }
  throw_invalid("a received scalar has the unknown tag {}", static_cast<unsigned>(tag));
}

void Wire<at::ScalarType>::encode(wire::Encoder& encoder, at::ScalarType value) {
  encoder.bytes().put(wire::dtype_code(value));
}

at::ScalarType Wire<at::ScalarType>::decode(wire::Decoder& decoder) {
  return wire::dtype_from_code(decoder.bytes().get<std::uint8_t>());
}

void Wire<c10::Device>::encode(wire::Encoder& encoder, const c10::Device& value) {
  encoder.bytes().put_string(value.str());
}

c10::Device Wire<c10::Device>::decode(wire::Decoder& decoder) {
  return device::parse(decoder.bytes().get_string());
}

}  // namespace torchspan
