#include <bit>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"

namespace torchspan {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;
using wire::Decoder;
using wire::Encoder;
using wire::NestingScope;

/// What a value is, and what the elements of a list or dict are declared to be. The numbers never change.
enum class Tag : std::uint8_t {
  kNone = 0,
  kBool = 1,
  kInt = 2,
  kDouble = 3,
  kComplex = 4,
  kString = 5,
  kTensor = 6,
  kDevice = 7,
  kList = 8,
  kTuple = 9,
  kDict = 10,
  // Only as declared types: the values inside carry their own tags.
  kAny = 16,
  kNumber = 17,
  kOptional = 18,
};

[[noreturn]] void throw_unsupported(const std::string& what) {
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("a TorchScript value of type {} cannot be sent; only None, bool, int, float, complex, "
                  "str, Tensor, Device and lists, tuples and dicts of them can",
                  what));
}

[[noreturn]] void throw_unknown_tag(Tag tag) {
  throw_invalid("a received TorchScript value has the unknown tag {}", static_cast<unsigned>(tag));
}

Tag tag_of_type(const c10::Type& type) {
  switch (type.kind()) {
    case TypeKind::AnyType:
      return Tag::kAny;
    case TypeKind::NumberType:
      return Tag::kNumber;
    case TypeKind::OptionalType:
      return Tag::kOptional;
    case TypeKind::BoolType:
      return Tag::kBool;
    case TypeKind::IntType:
      return Tag::kInt;
    case TypeKind::FloatType:
      return Tag::kDouble;
    case TypeKind::ComplexType:
      return Tag::kComplex;
    case TypeKind::StringType:
      return Tag::kString;
    case TypeKind::TensorType:
      return Tag::kTensor;
    case TypeKind::DeviceObjType:
      return Tag::kDevice;
    case TypeKind::ListType:
      return Tag::kList;
    case TypeKind::TupleType:
      return Tag::kTuple;
    case TypeKind::DictType:
      return Tag::kDict;
    default:
      throw_unsupported(type.repr_str());
  }
}

Tag tag_of_value(const IValue& value) {
  if (value.isNone()) return Tag::kNone;
  if (value.isTensor()) return Tag::kTensor;
  if (value.isBool()) return Tag::kBool;
  if (value.isInt()) return Tag::kInt;
  if (value.isDouble()) return Tag::kDouble;
  if (value.isComplexDouble()) return Tag::kComplex;
  if (value.isString()) return Tag::kString;
  if (value.isDevice()) return Tag::kDevice;
  if (value.isList()) return Tag::kList;
  if (value.isTuple()) return Tag::kTuple;
  if (value.isGenericDict()) return Tag::kDict;
  throw_unsupported(value.tagKind());
}

/// Only what LibTorch can hash by value: a Tensor key would be a different key on the receiver.
void check_key(Tag key) {
  if (key == Tag::kBool || key == Tag::kInt || key == Tag::kDouble || key == Tag::kComplex ||
      key == Tag::kString || key == Tag::kDevice) {
    return;
  }
  throw Error(ErrorKind::kUnsupported,
              "a TorchScript dict can be sent only with bool, int, float, complex, str or Device keys");
}

/// Every declared type takes at least one byte per value, so that counts can be checked. An optional of an
/// optional, an optional of Any and a tuple without fields would take none, or would be ambiguous.
void check_declared(Tag outer, Tag inner) {
  if (outer == Tag::kOptional && (inner == Tag::kOptional || inner == Tag::kAny)) {
    throw Error(ErrorKind::kUnsupported, "Optional[Any] and Optional[Optional[...]] cannot be sent");
  }
}

void check_fields(std::size_t count) {
  if (count == 0) throw Error(ErrorKind::kUnsupported, "lists and dicts of empty tuples cannot be sent");
}

void encode_type(Encoder& encoder, const TypePtr& type) {
  NestingScope scope(encoder);
  const Tag tag = tag_of_type(*type);
  encoder.bytes().put(tag);
  const auto parts = type->containedTypes();
  if (tag == Tag::kTuple) {
    check_fields(parts.size());
    wire::encode_count(encoder, parts.size());
    for (const TypePtr& part : parts) encode_type(encoder, part);
  } else if (tag == Tag::kDict) {
    check_key(tag_of_type(*parts[0]));
    encode_type(encoder, parts[0]);
    encode_type(encoder, parts[1]);
  } else if (tag == Tag::kList) {
    encode_type(encoder, parts[0]);
  } else if (tag == Tag::kOptional) {
    const TypePtr& part = type->expectRef<c10::OptionalType>().getElementType();
    check_declared(tag, tag_of_type(*part));
    encode_type(encoder, part);
  }
}

TypePtr decode_type(Decoder& decoder) {
  NestingScope scope(decoder);
  const Tag tag = decoder.bytes().get<Tag>();
  switch (tag) {
    case Tag::kAny:
      return c10::AnyType::get();
    case Tag::kNumber:
      return c10::NumberType::get();
    case Tag::kBool:
      return c10::BoolType::get();
    case Tag::kInt:
      return c10::IntType::get();
    case Tag::kDouble:
      return c10::FloatType::get();
    case Tag::kComplex:
      return c10::ComplexType::get();
    case Tag::kString:
      return c10::StringType::get();
    case Tag::kTensor:
      return c10::TensorType::get();
    case Tag::kDevice:
      return c10::DeviceObjType::get();
    case Tag::kList:
      return c10::ListType::create(decode_type(decoder));
    case Tag::kOptional: {
      TypePtr part = decode_type(decoder);
      check_declared(tag, tag_of_type(*part));
      return c10::OptionalType::create(std::move(part));
    }
    case Tag::kDict: {
      TypePtr key = decode_type(decoder);
      check_key(tag_of_type(*key));
      return c10::DictType::create(std::move(key), decode_type(decoder));
    }
    case Tag::kTuple: {
      const std::size_t count = decoder.bytes().get_count(1);
      check_fields(count);
      std::vector<TypePtr> parts;
      for (std::size_t i = 0; i < count; ++i) parts.push_back(decode_type(decoder));
      return c10::TupleType::create(std::move(parts));
    }
    case Tag::kNone:
      break;
  }
  throw_unknown_tag(tag);
}

void encode_tagged(Encoder& encoder, const IValue& value);
IValue decode_tagged(Decoder& decoder);

/// Writes a value whose type the reader already knows; throws if the value does not have that type.
void encode_declared(Encoder& encoder, const IValue& value, const TypePtr& type);
IValue decode_declared(Decoder& decoder, const TypePtr& type);

void encode_elements(Encoder& encoder, const IValue& list, const TypePtr& element_type) {
  const c10::impl::GenericList elements = list.toList();
  wire::encode_count(encoder, elements.size());
  for (const IValue& element : elements.vec()) encode_declared(encoder, element, element_type);
}

IValue decode_elements(Decoder& decoder, const TypePtr& element_type) {
  c10::impl::GenericList elements(element_type);
  for (std::size_t left = decoder.bytes().get_count(1); left > 0; --left) {
    elements.push_back(decode_declared(decoder, element_type));
  }
  return elements;
}

/// LibTorch's dict doubles its table until every key is near its place, so a few colliding keys could take
/// unlimited memory. Ordinary keys never collide often enough to be refused.
void check_spread(const std::vector<std::pair<IValue, IValue>>& entries) {
  constexpr std::uint8_t kCrowd = 8;
  constexpr std::uint64_t kGoldenRatio =
      0x9E3779B97F4A7C15;  // the multiplier with which that table spreads hashes
  const std::size_t places = std::bit_ceil(entries.size() * kCrowd + 2);
  std::vector<std::uint8_t> taken(places);
  for (const auto& [key, value] : entries) {
    const std::uint64_t place =
        c10::detail::DictKeyHash()(key) * kGoldenRatio >> (64 - std::countr_zero(places));
    if (++taken[place] > kCrowd) {
      throw_invalid("a received TorchScript dict has keys whose hashes collide");
    }
  }
}

/// A NaN is not equal to itself, so a dict could hold it many times.
void check_key_value(const IValue& key) {
  const bool real = key.isDouble() && key.toDouble() != key.toDouble();
  if (real || (key.isComplexDouble() && key.toComplexDouble() != key.toComplexDouble())) {
    throw_invalid("a NaN cannot be the key of a TorchScript dict that is sent");
  }
}

void encode_entries(Encoder& encoder, const IValue& dict, const TypePtr& key, const TypePtr& value) {
  const c10::impl::GenericDict entries = dict.toGenericDict();
  wire::encode_count(encoder, entries.size());
  for (const auto& entry : entries) {
    check_key_value(entry.key());
    encode_declared(encoder, entry.key(), key);
    encode_declared(encoder, entry.value(), value);
  }
}

IValue decode_entries(Decoder& decoder, const TypePtr& key_type, const TypePtr& value_type) {
  std::vector<std::pair<IValue, IValue>> entries;
  for (std::size_t left = decoder.bytes().get_count(1); left > 0; --left) {
    IValue key = decode_declared(decoder, key_type);
    check_key_value(key);
    entries.emplace_back(std::move(key), decode_declared(decoder, value_type));
  }
  check_spread(entries);
  c10::impl::GenericDict dict(key_type, value_type);
  dict.reserve(entries.size());
  for (auto& [key, value] : entries) {
    if (!dict.insert(std::move(key), std::move(value)).second) wire::throw_duplicate_key("TorchScript dict");
  }
  return dict;
}

/// Bool, Int, Double, Complex, String, Tensor and Device, without their tag.
void encode_leaf(Encoder& encoder, const IValue& value, Tag tag) {
  switch (tag) {
    case Tag::kBool:
      return encoder.bytes().put(value.toBool());
    case Tag::kInt:
      return encoder.bytes().put(value.toInt());
    case Tag::kDouble:
      return encoder.bytes().put(value.toDouble());
    case Tag::kComplex:
      return wire::encode(encoder, value.toComplexDouble());
    case Tag::kString:
      return encoder.bytes().put_string(value.toStringRef());
    case Tag::kTensor:
      return encoder.tensor(value.toTensor());
    case Tag::kDevice:
      return wire::encode(encoder, value.toDevice());
    default:
      throw_unknown_tag(tag);
  }
}

IValue decode_leaf(Decoder& decoder, Tag tag) {
  switch (tag) {
    case Tag::kBool:
      return wire::decode<bool>(decoder);
    case Tag::kInt:
      return wire::decode<std::int64_t>(decoder);
    case Tag::kDouble:
      return wire::decode<double>(decoder);
    case Tag::kComplex:
      return wire::decode<c10::complex<double>>(decoder);
    case Tag::kString:
      return wire::decode<std::string>(decoder);
    case Tag::kTensor:
      return decoder.tensor();
    case Tag::kDevice:
      return wire::decode<c10::Device>(decoder);
    default:
      throw_unknown_tag(tag);
  }
}

void check_number(const IValue& value) {
  if (!value.isScalar()) {
    throw_invalid("a TorchScript number is declared, but the value is a {}", value.tagKind());
  }
}

void encode_declared(Encoder& encoder, const IValue& value, const TypePtr& type) {
  const Tag declared = tag_of_type(*type);
  if (declared == Tag::kAny) return encode_tagged(encoder, value);
  if (declared == Tag::kNumber) {
    check_number(value);
    return encode_tagged(encoder, value);
  }
  NestingScope scope(encoder);
  if (declared == Tag::kOptional) {
    encoder.bytes().put(!value.isNone());
    if (value.isNone()) return;
    return encode_declared(encoder, value, type->expectRef<c10::OptionalType>().getElementType());
  }
  if (tag_of_value(value) != declared) {
    throw_invalid("a TorchScript container of {} holds a {}", type->repr_str(), value.tagKind());
  }
  const auto parts = type->containedTypes();
  if (declared == Tag::kList) return encode_elements(encoder, value, parts[0]);
  if (declared == Tag::kDict) return encode_entries(encoder, value, parts[0], parts[1]);
  if (declared != Tag::kTuple) return encode_leaf(encoder, value, declared);
  const auto& fields = value.toTupleRef().elements();
  if (fields.size() != parts.size()) {
    throw_invalid("a TorchScript tuple of {} fields is declared as {}", fields.size(), type->repr_str());
  }
  for (std::size_t i = 0; i < parts.size(); ++i) encode_declared(encoder, fields[i], parts[i]);
}

IValue decode_declared(Decoder& decoder, const TypePtr& type) {
  const Tag declared = tag_of_type(*type);
  if (declared == Tag::kAny) return decode_tagged(decoder);
  if (declared == Tag::kNumber) {
    IValue value = decode_tagged(decoder);
    check_number(value);
    return value;
  }
  NestingScope scope(decoder);
  if (declared == Tag::kOptional) {
    if (!wire::decode_flag(decoder)) return IValue();
    return decode_declared(decoder, type->expectRef<c10::OptionalType>().getElementType());
  }
  const auto parts = type->containedTypes();
  if (declared == Tag::kList) return decode_elements(decoder, parts[0]);
  if (declared == Tag::kDict) return decode_entries(decoder, parts[0], parts[1]);
  if (declared != Tag::kTuple) return decode_leaf(decoder, declared);
  std::vector<IValue> fields;
  for (const TypePtr& part : parts) fields.push_back(decode_declared(decoder, part));
  return c10::ivalue::Tuple::create(std::move(fields));
}

void encode_tagged(Encoder& encoder, const IValue& value) {
  NestingScope scope(encoder);
  const Tag tag = tag_of_value(value);
  encoder.bytes().put(tag);
  if (tag == Tag::kNone) return;
  if (tag == Tag::kTuple) {
    const auto& fields = value.toTupleRef().elements();
    wire::encode_count(encoder, fields.size());
    for (const IValue& field : fields) encode_tagged(encoder, field);
  } else if (tag == Tag::kList) {
    const TypePtr element_type = value.toList().elementType();
    encode_type(encoder, element_type);
    encode_elements(encoder, value, element_type);
  } else if (tag == Tag::kDict) {
    const c10::impl::GenericDict dict = value.toGenericDict();
    check_key(tag_of_type(*dict.keyType()));
    encode_type(encoder, dict.keyType());
    encode_type(encoder, dict.valueType());
    encode_entries(encoder, value, dict.keyType(), dict.valueType());
  } else {
    encode_leaf(encoder, value, tag);
  }
}

IValue decode_tagged(Decoder& decoder) {
  NestingScope scope(decoder);
  const Tag tag = decoder.bytes().get<Tag>();
  if (tag == Tag::kNone) return IValue();
  if (tag == Tag::kTuple) {
    std::vector<IValue> fields;
    for (std::size_t left = decoder.bytes().get_count(1); left > 0; --left) {
      fields.push_back(decode_tagged(decoder));
    }
    return c10::ivalue::Tuple::create(std::move(fields));
  }
  if (tag == Tag::kList) return decode_elements(decoder, decode_type(decoder));
  if (tag == Tag::kDict) {
    const TypePtr key = decode_type(decoder);
    check_key(tag_of_type(*key));
    const TypePtr value = decode_type(decoder);
    return decode_entries(decoder, key, value);
  }
  return decode_leaf(decoder, tag);
}

}  // namespace

void Wire<IValue>::encode(Encoder& encoder, const IValue& value) { encode_tagged(encoder, value); }

IValue Wire<IValue>::decode(Decoder& decoder) {
  try {
    return decode_tagged(decoder);
  } catch (const c10::Error& error) {
    throw_invalid("LibTorch refused a TorchScript value: {}", error.what_without_backtrace());
  }
}

}  // namespace torchspan
