#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/wire.h>

#include "wire/wire_test_util.h"

namespace {

struct Batch {
  at::Tensor data;
  std::int64_t instance = 0;
  std::vector<std::string> tags;
};

struct Tree {
  std::int32_t value = 0;
  std::vector<Tree> children;
  friend bool operator==(const Tree&, const Tree&) = default;
};

/// Sent with all members.
struct Named {
  static constexpr torchspan::FixedString kWireName = "Named";
  std::int32_t value = 0;
  std::vector<Named> children = {};
  std::optional<double> weight = {};
  std::string label;
  friend bool operator==(const Named&, const Named&) = default;
};
struct Ten {
  static constexpr torchspan::FixedString kWireName = "Ten";
  std::int32_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0, i = 0, j = 0;
  friend bool operator==(const Ten&, const Ten&) = default;
};

struct Nothing {};
struct Unknown {};
enum class Colour : std::uint16_t { kRed = 1, kBlue = 700 };
using Text = std::string;

/// Sends only its length: a type with a hand-written encoding.
struct Ruler {
  std::uint32_t length = 0;
};

}  // namespace

template <>
struct torchspan::Wire<Batch>
    : torchspan::WireStruct<Batch, "Batch", &Batch::data, &Batch::instance, &Batch::tags> {};
template <>
struct torchspan::Wire<Tree> : torchspan::WireStruct<Tree, "Tree", &Tree::value, &Tree::children> {};
template <>
struct torchspan::Wire<Nothing> : torchspan::WireStruct<Nothing, "Nothing"> {};
template <>
struct torchspan::Wire<Ruler> {
  static std::string name() { return "Ruler"; }
  static void encode(wire::Encoder& encoder, const Ruler& ruler) { encoder.bytes().put(ruler.length); }
  static Ruler decode(wire::Decoder& decoder) { return {decoder.bytes().get<std::uint32_t>()}; }
};

namespace torchspan::wire::values_test {
namespace {

template <class T>
T copy_by_wire(const T& value) {
  Payload payload = to_payload(value);
  return from_payload<T>(payload);
}

template <class T>
void expect_kept(const T& value) {
  EXPECT_EQ(copy_by_wire(value), value) << type_name<T>();
}

Payload payload_of(std::initializer_list<int> bytes) {
  Payload payload;
  for (int byte : bytes) payload.value.push_back(static_cast<std::byte>(byte));
  return payload;
}

template <class T>
void expect_invalid(Payload payload) {
  EXPECT_EQ(kind_of([&] { from_payload<T>(payload); }), ErrorKind::kInvalid) << type_name<T>();
}

TEST(Values, EveryArithmeticTypeKeepsItsLimits) {
  const auto check = []<class T>(T) {
    expect_kept(std::numeric_limits<T>::lowest());
    expect_kept(std::numeric_limits<T>::max());
    expect_kept(T{0});
  };
  check(false), check('a'), check(std::int8_t{}), check(std::uint8_t{}), check(std::int16_t{});
  check(std::uint16_t{}), check(std::int32_t{}), check(std::uint32_t{}), check(std::int64_t{});
  check(std::uint64_t{}), check(0LL), check(0ULL), check(0.0f), check(0.0);
}

TEST(Values, FloatsKeepTheirBitsEvenWhenTheyAreNoNumbers) {
  const double odd = std::bit_cast<double>(0x7FF4000000000123ull);
  EXPECT_EQ(std::bit_cast<std::uint64_t>(copy_by_wire(odd)), 0x7FF4000000000123ull);
  EXPECT_TRUE(std::signbit(copy_by_wire(-0.0)));
  EXPECT_EQ(copy_by_wire(c10::Half(0x7E01, c10::Half::from_bits())).x, 0x7E01);
  EXPECT_EQ(copy_by_wire(c10::BFloat16(0x7FC3, c10::BFloat16::from_bits())).x, 0x7FC3);
  expect_kept(c10::complex<float>(1.5f, -2.5f));
  expect_kept(c10::complex<double>(-1e300, 1e-300));
}

TEST(Values, StructsThatStateAWireNameKeepAllTheirMembers) {
  const Named named{1, {{2, {}, {}, "leaf"}}, 0.5, "root"};
  expect_kept(named);
  EXPECT_EQ(to_payload(named).value,
            to_payload(named.value, named.children, named.weight, named.label).value);
  expect_kept(Ten{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
}

TEST(Values, ContainersKeepTheirElements) {
  expect_kept(Text("with \0 inside", 13));
  expect_kept(std::vector<std::int64_t>{1, -2, 3});
  expect_kept(std::vector<bool>{true, false, true});
  expect_kept(std::vector<Text>{"", "a", Text(1000, 'x')});
  expect_kept(std::vector<std::vector<double>>{{}, {1.0}, {2.0, 3.0}});
  expect_kept(std::vector<c10::complex<float>>{{1, 2}, {3, 4}});
  expect_kept(std::array<Text, 3>{"x", "y", "z"});
  expect_kept(std::array<int, 0>{});
  expect_kept(std::array{c10::Device("cpu"), c10::Device("cuda:1")});  // not default-constructible
  expect_kept(std::pair(1, Text("one")));
  expect_kept(std::tuple<>());
  expect_kept(std::tuple(Text("first"), std::uint8_t{2}, 3.0));
  expect_kept(std::optional<Text>("there"));
  expect_kept(std::optional<Text>());
  expect_kept(std::map<Text, std::tuple<std::int64_t, double>>{{"a", {1, 2.0}}, {"b", {3, 4.0}}});
  expect_kept(std::unordered_map<int, Text>{{1, "a"}, {2, "b"}, {-7, ""}});
  expect_kept(Bytes{std::byte{1}, std::byte{255}});
  EXPECT_EQ(copy_by_wire(c10::optional<int>(7)), c10::optional<int>(7));
  EXPECT_EQ(copy_by_wire(c10::optional<int>()), c10::optional<int>());
}

TEST(Values, VariantsKeepTheAlternativeEvenOfEqualTypes) {
  using Choice = std::variant<std::monostate, int, Text, int>;
  expect_kept(Choice());
  expect_kept(Choice(std::in_place_index<1>, 5));
  expect_kept(Choice(std::in_place_index<3>, 5));
  expect_kept(Choice("text"));
  expect_invalid<Choice>(payload_of({4}));
}

TEST(Values, EnumsDevicesScalarsAndDtypesAreKept) {
  expect_kept(Colour::kBlue);
  expect_kept(static_cast<Colour>(9));
  expect_kept(c10::Device("cuda:3"));
  expect_kept(c10::Device("cpu"));
  for (const at::ScalarType dtype : {at::kBool, at::kQUInt2x4, at::kBFloat16, at::ScalarType::Undefined}) {
    expect_kept(dtype);
  }
  for (const c10::Scalar& scalar : {c10::Scalar(true), c10::Scalar(std::int64_t{1} << 62), c10::Scalar(0.1),
                                    c10::Scalar(c10::complex<double>(1, 2))}) {
    const c10::Scalar copy = copy_by_wire(scalar);
    EXPECT_EQ(copy.type(), scalar.type());
    EXPECT_EQ(copy.toComplexDouble(), scalar.toComplexDouble());
  }
  expect_invalid<c10::Scalar>(payload_of({9, 0, 0, 0, 0, 0, 0, 0, 0}));
  expect_invalid<c10::Device>(to_payload(Text("cuda:x")));
  expect_invalid<c10::Device>(to_payload(Text("cuda:99999999999999999999999")));
  expect_invalid<at::ScalarType>(payload_of({200}));
}

TEST(Values, DtypesOfANewerLibTorchAreUnsupportedRatherThanInvalid) {
  if (TORCH_VERSION_MAJOR >= 2) GTEST_SKIP() << "this LibTorch has them";
  Payload payload = payload_of({24});
  EXPECT_EQ(kind_of([&] { from_payload<at::ScalarType>(payload); }), ErrorKind::kUnsupported);
}

TEST(Values, DurationsTravelAsNanosecondsInEveryUnit) {
  using namespace std::chrono;
  expect_kept(Duration::max());
  expect_kept(Duration::min());
  expect_kept(hours(-5));
  expect_kept(duration<std::int64_t, std::ratio<1, 30>>(90));
  EXPECT_EQ(copy_by_wire(duration<double>(0.25)), duration<double>(0.25));
  Payload payload = to_payload(milliseconds(1999));
  EXPECT_EQ(from_payload<seconds>(payload), seconds(1));
  EXPECT_EQ(from_payload<nanoseconds>(payload), nanoseconds(1'999'000'000));
}

TEST(Values, DurationsThatDoNotFitAreRefusedOnEitherSide) {
  using namespace std::chrono;
  EXPECT_EQ(kind_of([] { to_payload(hours::max()); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([] { to_payload(duration<double>(std::nan(""))); }), ErrorKind::kInvalid);
  expect_invalid<duration<std::int8_t, std::milli>>(to_payload(seconds(1)));
  expect_invalid<duration<std::int64_t, std::pico>>(to_payload(nanoseconds::max()));
}

TEST(Values, TensorsAndReferencesStayTheSameObjectsInTheirTables) {
  const at::Tensor tensor = torch::ones({2, 3});
  const auto object = std::make_shared<int>(5);
  Payload payload;
  Encoder encoder(payload);
  wire::encode(encoder, std::vector{tensor, at::Tensor()});
  encoder.reference(object);
  encoder.finish();
  ASSERT_EQ(payload.tensors.size(), 2u);
  EXPECT_TRUE(payload.tensors[0].is_same(tensor));
  Decoder decoder(payload);
  const auto tensors = wire::decode<std::vector<at::Tensor>>(decoder);
  EXPECT_TRUE(tensors[0].is_same(tensor));
  EXPECT_FALSE(tensors[1].defined());
  EXPECT_EQ(decoder.reference(), object);
  decoder.expect_end();
}

TEST(Values, AnInterceptorsReplacementIsWhatArrives) {
  Payload payload = to_payload(Batch{torch::ones({2}), 4, {"a"}});
  const at::Tensor replacement = torch::zeros({3});
  payload.tensors[0] = replacement;
  const auto batch = from_payload<Batch>(payload);
  EXPECT_TRUE(batch.data.is_same(replacement));
  EXPECT_EQ(replacement.use_count(), 2u) << "the payload released it";
  EXPECT_EQ(batch.instance, 4);
  EXPECT_EQ(batch.tags, std::vector<Text>{"a"});
}

TEST(Values, AnIndexBeyondItsTableIsRefused) {
  Payload payload = payload_of({1, 0, 0, 0});
  payload.tensors.push_back(torch::ones({1}));
  payload.references.push_back(std::make_shared<int>(1));
  EXPECT_EQ(kind_of([&] { Decoder(payload).tensor(); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { Decoder(payload).reference(); }), ErrorKind::kInvalid);
}

TEST(Values, EncodingUsesTheCapacityOfThePayload) {
  Payload payload;
  payload.value.reserve(4096);
  const std::byte* memory = payload.value.data();
  Encoder encoder(payload);
  wire::encode(encoder, Text(4000, 'x'));
  encoder.finish();
  EXPECT_EQ(payload.value.data(), memory);
}

TEST(Names, DescribeTheEncodingAndNotTheCompilersName) {
  EXPECT_EQ(type_name<std::int64_t>(), "int64");
  EXPECT_EQ(type_name<long long>(), "int64");
  EXPECT_EQ(type_name<unsigned char>(), "uint8");
  EXPECT_EQ(type_name<char>(), "char");
  EXPECT_EQ(type_name<float>(), "float32");
  EXPECT_EQ(type_name<Unit>(), "void");
  EXPECT_EQ(type_name<std::vector<at::Tensor>>(), "vector<Tensor>");
  EXPECT_EQ((type_name<std::map<Text, std::tuple<std::int64_t, double>>>()),
            "map<string, tuple<int64, float64>>");
  EXPECT_EQ((type_name<std::array<std::pair<bool, Text>, 2>>()), "array<pair<bool, string>, 2>");
  EXPECT_EQ((type_name<std::variant<std::monostate, std::unordered_map<int, Colour>>>()),
            "variant<monostate, unordered_map<int32, enum<uint16>>>");
  EXPECT_EQ(type_name<std::tuple<>>(), "tuple<>");
  EXPECT_EQ(type_name<std::optional<int>>(), "optional<int32>");
  EXPECT_EQ(type_name<c10::optional<int>>(), "optional<int32>");
  EXPECT_EQ(type_name<std::vector<c10::complex<float>>>(), "vector<complex<float32>>");
  EXPECT_EQ((type_name<std::tuple<c10::IValue, c10::Scalar, at::ScalarType, c10::Device, Duration, Ruler>>()),
            "tuple<IValue, Scalar, ScalarType, Device, duration, Ruler>");
}

TEST(Names, StructsNameTheirMembersOnceEvenWhenTheyAreRecursive) {
  EXPECT_EQ(type_name<Batch>(), "Batch{Tensor, int64, vector<string>}");
  EXPECT_EQ(type_name<Tree>(), "Tree{int32, vector<Tree>}");
  EXPECT_EQ(type_name<Named>(), "Named{int32, vector<Named>, optional<float64>, string}");
  EXPECT_EQ(type_name<Ten>(), "Ten{int32, int32, int32, int32, int32, int32, int32, int32, int32, int32}");
  EXPECT_EQ(type_name<std::vector<Nothing>>(), "vector<Nothing{}>");
}

TEST(Names, DigestsAreTheSameInEveryProcessAndDifferByType) {
  EXPECT_EQ(digest(""), 0x2D06800538D394C2ull);  // XXH3's published value for no input
  EXPECT_EQ(type_tag<std::int64_t>(), digest("int64"));
  EXPECT_NE(type_tag<std::int64_t>(), type_tag<std::uint64_t>());
}

TEST(Names, TypesThatCannotBeSentAreKnownAtCompileTime) {
  static_assert(Transferable<Batch> && Transferable<std::vector<Tree>> && Transferable<Error>);
  static_assert(!Transferable<Unknown> && !Transferable<std::vector<Unknown>>);
  static_assert(!Transferable<std::map<Text, std::optional<Unknown>>>);
  static_assert(!Transferable<int*> && !Transferable<const char*> && !Transferable<std::shared_ptr<int>>);
  static_assert(!Transferable<wchar_t> && !Transferable<long double> && !Transferable<std::string_view>);
}

TEST(HostileValues, ACountBeyondTheBytesIsRefusedBeforeMemoryIsTaken) {
  expect_invalid<std::vector<std::int64_t>>(payload_of({0xFF, 0xFF, 0xFF, 0xFF, 1, 2, 3, 4, 5, 6, 7, 8}));
  expect_invalid<std::vector<Text>>(payload_of({0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0}));
  expect_invalid<std::vector<std::array<double, 100000>>>(payload_of({4, 0, 0, 0, 1, 2, 3, 4}));
  expect_invalid<std::map<int, int>>(payload_of({0xFF, 0xFF, 0xFF, 0x7F, 0, 0, 0, 0, 0, 0, 0, 0}));
  expect_invalid<Text>(payload_of({0xFF, 0xFF, 0xFF, 0xFF, 'a'}));
  expect_invalid<std::vector<Unit>>(payload_of({0xFF, 0xFF, 0xFF, 0xFF}));
  expect_invalid<std::vector<bool>>(payload_of({0xFF, 0xFF, 0xFF, 0xFF, 1}));
}

TEST(HostileValues, SequencesOfEmptyElementsAreRejectedByTheSender) {
  EXPECT_EQ(kind_of([] { to_payload(std::vector<Unit>(3)); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([] { to_payload(std::vector<Nothing>(3)); }), ErrorKind::kInvalid);
  EXPECT_EQ(copy_by_wire(std::vector<Unit>()).size(), 0u);
}

TEST(HostileValues, FlagsThatAreNeitherTrueNorFalseAreRefused) {
  expect_invalid<bool>(payload_of({2}));
  expect_invalid<std::optional<int>>(payload_of({2, 0, 0, 0, 0}));
  expect_invalid<std::vector<bool>>(payload_of({1, 0, 0, 0, 255}));
}

TEST(HostileValues, AMapWithTheSameKeyTwiceIsRefused) {
  const std::vector<std::pair<int, int>> entries{{1, 2}, {1, 3}};
  expect_invalid<std::map<int, int>>(to_payload(entries));
  expect_invalid<std::unordered_map<int, int>>(to_payload(entries));
}

TEST(HostileValues, BytesLeftOverAreRefused) { expect_invalid<int>(payload_of({1, 0, 0, 0, 9})); }

Tree chain(int length) {
  Tree tree;
  for (int i = 1; i < length; ++i) {
    Tree parent;
    parent.value = i;
    parent.children.push_back(std::move(tree));
    tree = std::move(parent);
  }
  return tree;
}

TEST(HostileValues, NestingIsLimitedOnBothSides) {
  expect_kept(chain(kMaxNesting / 2));  // a node is two levels: the struct and its vector
  EXPECT_EQ(kind_of([] { to_payload(chain(kMaxNesting / 2 + 1)); }), ErrorKind::kInvalid);
  Payload deep;
  for (int i = 0; i < 1000; ++i) {
    deep.value.insert(deep.value.end(), {std::byte{0}, std::byte{0}, std::byte{0}, std::byte{0}});  // value
    deep.value.insert(deep.value.end(),
                      {std::byte{1}, std::byte{0}, std::byte{0}, std::byte{0}});  // one child
  }
  deep.value.insert(deep.value.end(), 8, std::byte{0});
  expect_invalid<Tree>(std::move(deep));
}

/// No map and no float, so that equal values have equal bytes.
using Mixture =
    std::vector<std::tuple<Text, std::optional<std::vector<std::uint16_t>>,
                           std::variant<std::monostate, std::pair<bool, Text>, std::vector<bool>>>>;

Mixture random_mixture(std::mt19937_64& random) {
  const auto text = [&] { return Text(random() % 20, static_cast<char>(random())); };
  Mixture mixture(random() % 6);
  for (auto& [name, numbers, choice] : mixture) {
    name = text();
    if (random() % 2 == 0) {
      numbers.emplace(random() % 10);
      for (auto& number : *numbers) number = static_cast<std::uint16_t>(random());
    }
    switch (random() % 3) {
      case 1:
        choice = std::pair(random() % 2 == 0, text());
        break;
      case 2:
        choice = std::vector<bool>(random() % 9, random() % 2 == 0);
        break;
      default:
        break;
    }
  }
  return mixture;
}

TEST(RandomValues, AreKept) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    expect_kept(random_mixture(random));
  }
}

TEST(RandomValues, DamagedBytesGiveAValueWithExactlyThoseBytesOrAnError) {
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    const Bytes valid = to_payload(random_mixture(random)).value;
    refused += damage(valid, seed, 200, [](const Bytes& bytes) {
      Payload payload{bytes, {}, {}};
      EXPECT_EQ(to_payload(from_payload<Mixture>(payload)).value, bytes);
    });
  }
  EXPECT_GT(refused, 1000);
}

TEST(Errors, KeepAllTheirParts) {
  Error error(ErrorKind::kRemoteFailure, "the function threw");
  error.with_worker("worker1").with_call("Encoder.forward").with_elapsed(std::chrono::milliseconds(1500));
  error.with_frame({"worker2", "mean_of", "std::out_of_range", "index 7"})
      .with_frame({"worker1", "f", "E", ""});
  const Error copy = copy_by_wire(error);
  EXPECT_EQ(copy.kind(), error.kind());
  EXPECT_EQ(copy.message(), error.message());
  EXPECT_EQ(copy.worker(), error.worker());
  EXPECT_EQ(copy.call(), error.call());
  EXPECT_EQ(copy.elapsed(), error.elapsed());
  ASSERT_EQ(copy.frames().size(), 2u);
  EXPECT_EQ(copy.frames()[0].text, "index 7");
  EXPECT_STREQ(copy.what(), error.what());
}

TEST(Errors, OfAForeignKindKeepTheirNumber) {
  const Error copy = copy_by_wire(Error(static_cast<ErrorKind>(99), "from the future"));
  EXPECT_EQ(static_cast<int>(copy.kind()), 99);
}

TEST(Errors, DamagedOnesDecodeToAnErrorOrFail) {
  Error error(ErrorKind::kTimedOut, "late");
  error.with_frame({"worker2", "f", "E", "text"});
  EXPECT_GT(damage(to_payload(error).value, 1, 2000,
                   [](const Bytes& bytes) {
                     Payload payload{bytes, {}, {}};
                     from_payload<Error>(payload);
                   }),
            100);
}

TEST(Errors, WithTooManyFramesAreTruncatedByTheSenderAndRejectedByTheReceiver) {
  Error error(ErrorKind::kInvalid, "deep");
  for (int i = 0; i < 300; ++i) error.with_frame({"w" + std::to_string(i), "", "", ""});
  const Error copy = copy_by_wire(error);
  ASSERT_EQ(copy.frames().size(), 256u);
  EXPECT_EQ(copy.frames()[255].worker, "w255");
  Payload hostile = to_payload(ErrorKind::kInvalid, Text(), Text(), Text(), Duration(0), error.frames());
  expect_invalid<Error>(std::move(hostile));
}

}  // namespace
}  // namespace torchspan::wire::values_test
