#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <torch/torch.h>

#include <torchspan/wire.h>

#include "wire/wire_test_util.h"

namespace torchspan::wire::ivalue_test {
namespace {

using c10::IValue;

/// Equal in kind, declared element types and contents; tensors are compared as objects, NaNs by their bits.
bool same(const IValue& a, const IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  const auto all_same = [](const auto& x, const auto& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), same);
  };
  if (a.isNone()) return true;
  if (a.isTensor()) return a.toTensor().is_same(b.toTensor());
  const auto bits = [](double x) { return std::bit_cast<std::int64_t>(x); };
  if (a.isDouble()) return bits(a.toDouble()) == bits(b.toDouble());
  if (a.isComplexDouble()) {
    const auto x = a.toComplexDouble(), y = b.toComplexDouble();
    return bits(x.real()) == bits(y.real()) && bits(x.imag()) == bits(y.imag());
  }
  if (a.isTuple()) return all_same(a.toTupleRef().elements().vec(), b.toTupleRef().elements().vec());
  if (a.isList()) {
    return *a.toList().elementType() == *b.toList().elementType() && all_same(a.toListRef(), b.toListRef());
  }
  if (a.isGenericDict()) {
    const auto x = a.toGenericDict(), y = b.toGenericDict();
    return *x.keyType() == *y.keyType() && *x.valueType() == *y.valueType() && x.size() == y.size() &&
           std::equal(x.begin(), x.end(), y.begin(), [](const auto& p, const auto& q) {
             return same(p.key(), q.key()) && same(p.value(), q.value());
           });
  }
  return a == b;
}

void expect_kept(const IValue& value) {
  Payload payload = to_payload(value);
  const IValue copy = from_payload<IValue>(payload);
  EXPECT_TRUE(same(copy, value)) << value << " became " << copy;
}

ErrorKind refusal_of(const IValue& value) {
  return kind_of([&] { to_payload(value); });
}

ErrorKind refusal_of_bytes(std::initializer_list<int> bytes) {
  Payload payload;
  for (int byte : bytes) payload.value.push_back(static_cast<std::byte>(byte));
  return kind_of([&] { from_payload<IValue>(payload); });
}

TEST(IValues, SimpleOnesAreKept) {
  for (const IValue& value :
       {IValue(), IValue(true), IValue(std::int64_t{-5}), IValue(0.5), IValue(c10::complex<double>(1, -2)),
        IValue("text"), IValue(torch::ones({2})), IValue(at::Tensor()), IValue(c10::Device("cuda:1"))}) {
    expect_kept(value);
  }
}

TEST(IValues, ListsKeepTheirElementType) {
  expect_kept(c10::List<std::int64_t>({1, 2, 3}));
  expect_kept(c10::List<double>());
  expect_kept(c10::List<bool>({true, false}));
  expect_kept(c10::List<at::Tensor>({torch::ones({1}), at::Tensor()}));
  expect_kept(c10::List<std::string>({"a", ""}));
  expect_kept(c10::List<c10::complex<double>>({{1, 2}}));
  expect_kept(c10::List<c10::optional<at::Tensor>>({c10::nullopt, torch::ones({1})}));
  expect_kept(c10::List<c10::List<std::int64_t>>({c10::List<std::int64_t>({1}), c10::List<std::int64_t>()}));
  c10::impl::GenericList mixed(c10::AnyType::get());
  mixed.push_back(std::int64_t{1}), mixed.push_back(IValue()), mixed.push_back("x");
  expect_kept(mixed);
  c10::impl::GenericList numbers(c10::NumberType::get());
  numbers.push_back(std::int64_t{1}), numbers.push_back(2.5);
  expect_kept(numbers);
}

TEST(IValues, TuplesAndDictsAreKept) {
  expect_kept(c10::ivalue::Tuple::create(std::vector<IValue>{}));
  expect_kept(
      c10::ivalue::Tuple::create({IValue(1), IValue("two"), c10::ivalue::Tuple::create({IValue(3.0)})}));
  c10::Dict<std::string, at::Tensor> tensors;
  tensors.insert("z", torch::ones({1}));
  tensors.insert("a", torch::zeros({1}));
  expect_kept(tensors);
  c10::Dict<std::int64_t, c10::List<double>> lists;
  lists.insert(-1, c10::List<double>({0.5}));
  expect_kept(lists);
  const auto pair = c10::TupleType::create({c10::IntType::get(), c10::StringType::get()});
  c10::impl::GenericList pairs(pair);
  pairs.push_back(c10::ivalue::Tuple::create({IValue(1), IValue("one")}));
  expect_kept(pairs);
}

TEST(IValues, ReceivedListsServeAsArgumentsOfOperators) {
  Payload payload = to_payload(IValue(std::vector<std::int64_t>{2, 3}));
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::reshape", "");
  std::vector<IValue> stack{torch::arange(6), from_payload<IValue>(payload)};
  op.callBoxed(stack);
  EXPECT_EQ(stack[0].toTensor().sizes(), at::IntArrayRef({2, 3}));
}

TEST(IValues, ValuesThatCannotBeSentAreUnsupported) {
  EXPECT_EQ(refusal_of(c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get())),
            ErrorKind::kUnsupported);
  EXPECT_EQ(refusal_of(at::detail::createCPUGenerator()), ErrorKind::kUnsupported);
  c10::Dict<at::Tensor, std::int64_t> by_tensor;
  EXPECT_EQ(refusal_of(by_tensor), ErrorKind::kUnsupported);
  EXPECT_EQ(refusal_of(c10::impl::GenericList(c10::NoneType::get())), ErrorKind::kUnsupported);
}

TEST(IValues, AListThatHoldsSomethingElseThanItDeclaresIsRefused) {
  c10::impl::GenericList list(c10::IntType::get());
  list.push_back("not a number");
  EXPECT_EQ(refusal_of(list), ErrorKind::kInvalid);
}

TEST(HostileIValues, UnknownTagsTypesAndCountsAreRefused) {
  EXPECT_EQ(refusal_of_bytes({99}), ErrorKind::kInvalid);
  EXPECT_EQ(refusal_of_bytes({16}), ErrorKind::kInvalid);                        // Any as a value
  EXPECT_EQ(refusal_of_bytes({1, 2}), ErrorKind::kInvalid);                      // neither true nor false
  EXPECT_EQ(refusal_of_bytes({8, 0, 1, 0, 0, 0}), ErrorKind::kInvalid);          // list of None
  EXPECT_EQ(refusal_of_bytes({8, 2, 255, 255, 255, 255}), ErrorKind::kInvalid);  // 2^32 integers
  EXPECT_EQ(refusal_of_bytes({9, 255, 255, 255, 255, 0}), ErrorKind::kInvalid);  // 2^32 fields
  EXPECT_EQ(refusal_of_bytes({6, 0, 0, 0, 0}), ErrorKind::kInvalid);             // no such tensor
  EXPECT_EQ(refusal_of_bytes({10, 1, 1, 2, 0, 0, 0, 1, 0, 1, 1}), ErrorKind::kInvalid);  // a key twice
  EXPECT_EQ(refusal_of_bytes({8, 17, 1, 0, 0, 0, 0}), ErrorKind::kInvalid);              // None as a number
  EXPECT_EQ(refusal_of_bytes({8, 9, 0, 0, 0, 0, 0, 0, 0, 0}), ErrorKind::kUnsupported);  // list of ()
  EXPECT_EQ(refusal_of_bytes({8, 18, 18, 1, 0, 0, 0, 0}), ErrorKind::kUnsupported);      // optional optional
}

TEST(HostileIValues, NestingIsLimitedInValuesAndInTypes) {
  Payload values;
  for (int i = 0; i < 100000; ++i) {
    for (int byte : {9, 1, 0, 0, 0}) values.value.push_back(static_cast<std::byte>(byte));
  }
  EXPECT_EQ(kind_of([&] { from_payload<IValue>(values); }), ErrorKind::kInvalid);
  Payload types;
  types.value.assign(100000, std::byte{8});
  EXPECT_EQ(kind_of([&] { from_payload<IValue>(types); }), ErrorKind::kInvalid);
  IValue deep(1);
  for (int i = 0; i < 300; ++i) deep = c10::ivalue::Tuple::create({deep});
  EXPECT_EQ(refusal_of(deep), ErrorKind::kInvalid);
}

TEST(HostileIValues, KeysThatBurstLibTorchsHashTableAreRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  c10::Dict<double, std::int64_t> of_nan;
  of_nan.insert(nan, 1);
  EXPECT_EQ(refusal_of(of_nan), ErrorKind::kInvalid);

  const auto dict_bytes = [](std::uint8_t key_tag, const auto& keys) {
    Payload payload;
    Encoder encoder(payload);
    for (const std::uint8_t byte : {std::uint8_t{10}, key_tag, std::uint8_t{1}}) encoder.bytes().put(byte);
    encode_count(encoder, keys.size());
    for (const auto key : keys) {
      encoder.bytes().put(key);
      encoder.bytes().put(false);
    }
    encoder.finish();
    return payload;
  };
  Payload nans = dict_bytes(3, std::vector<double>(40, nan));
  EXPECT_EQ(kind_of([&] { from_payload<IValue>(nans); }), ErrorKind::kInvalid);

  // Multiples of the inverse of the table's multiplier have the same high bits once multiplied by it.
  std::uint64_t inverse = 1;
  for (int i = 0; i < 6; ++i) inverse *= 2 - 0x9E3779B97F4A7C15 * inverse;
  ASSERT_EQ(inverse * 0x9E3779B97F4A7C15, 1u);
  std::vector<std::uint64_t> keys;
  for (std::uint64_t k = 1; k <= 100; ++k) keys.push_back(k * inverse);
  Payload colliding = dict_bytes(2, keys);
  EXPECT_EQ(kind_of([&] { from_payload<IValue>(colliding); }), ErrorKind::kInvalid);
}

TEST(IValues, LargeDictsOfOrdinaryKeysAreKept) {
  c10::Dict<std::int64_t, bool> by_number;
  c10::Dict<std::string, bool> by_name;
  c10::Dict<double, bool> by_fraction;
  for (std::int64_t i = 0; i < 20000; ++i) {
    by_number.insert(i << 20, true);
    by_name.insert("layer." + std::to_string(i) + ".weight", false);
    by_fraction.insert(static_cast<double>(i) / 8, true);
  }
  expect_kept(by_number);
  expect_kept(by_name);
  expect_kept(by_fraction);
}

/// A value of random shape; containers become rarer with depth.
IValue random_value(std::mt19937_64& random, int depth) {
  switch (random() % (depth < 4 ? 11 : 7)) {
    case 0:
      return IValue();
    case 1:
      return random() % 2 == 0;
    case 2:
      return static_cast<std::int64_t>(random());
    case 3:
      return std::bit_cast<double>(random());
    case 4:
      return std::string(random() % 30, static_cast<char>(random()));
    case 5:
      return torch::zeros({1});
    case 6:
      return c10::complex<double>(static_cast<double>(random() % 100), 1);
    case 7: {
      c10::List<std::int64_t> list;
      for (std::size_t n = random() % 8; n > 0; --n) list.push_back(static_cast<std::int64_t>(random()));
      return list;
    }
    case 8: {
      c10::impl::GenericList list(c10::AnyType::get());
      for (std::size_t n = random() % 5; n > 0; --n) list.push_back(random_value(random, depth + 1));
      return list;
    }
    case 9: {
      std::vector<IValue> fields;
      for (std::size_t n = random() % 5; n > 0; --n) fields.push_back(random_value(random, depth + 1));
      return c10::ivalue::Tuple::create(std::move(fields));
    }
    default: {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      for (std::size_t n = random() % 5; n > 0; --n) {
        dict.insert_or_assign(std::to_string(random() % 100), random_value(random, depth + 1));
      }
      return dict;
    }
  }
}

TEST(RandomIValues, AreKept) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    expect_kept(random_value(random, 0));
  }
}

TEST(RandomIValues, DamagedBytesGiveAValueThatCanBeSentAgainOrAnError) {
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const Payload valid = to_payload(random_value(random, 0), random_value(random, 0));
    refused += damage(valid.value, seed, 200, [&](const Bytes& bytes) {
      Payload payload{bytes, valid.tensors, {}};
      expect_kept(std::get<0>(from_payload<std::tuple<IValue, IValue>>(payload)));
    });
  }
  EXPECT_GT(refused, 2000);
}

}  // namespace
}  // namespace torchspan::wire::ivalue_test
