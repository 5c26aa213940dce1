#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/pipeline/layers.h>

#include "tests/support/errors.h"

namespace torchspan::pipeline::batch_test {

using torchspan::testing::invalid_text;

/// A user's struct that layers return and take.
struct Attended {
  at::Tensor hidden;
  at::Tensor mask;
  std::int64_t heads = 0;
};

}  // namespace torchspan::pipeline::batch_test

namespace torchspan::pipeline {

template <>
struct BatchOf<batch_test::Attended> {
  static Batch from(batch_test::Attended value) {
    return Batch({Member<at::Tensor>::from(std::move(value.hidden)),
                  Member<at::Tensor>::from(std::move(value.mask)), value.heads});
  }
  static batch_test::Attended to(const Batch& batch) {
    BatchOf<int>::check(batch.size(), 3);
    return {Member<at::Tensor>::to(batch.members[0]), Member<at::Tensor>::to(batch.members[1]),
            Member<std::int64_t>::to(batch.members[2])};
  }
};

}  // namespace torchspan::pipeline

namespace torchspan::pipeline::batch_test {
namespace {

using ::testing::HasSubstr;

at::Tensor number(double value) { return at::full({2}, value); }

/// Runs a layer on `input`.
template <class F>
Batch run(F function, const Batch& input) {
  Layers layers;
  layers.add_function("layer", std::move(function));
  Skips skips({}, {});
  return layers.uses()[0].call(nullptr, input, skips);
}

// peer: pipe test_microbatch `batch_atomic`, `batch_non_atomic`, `batch_call`, `batch_setitem_by_index`,
//   `batch_setitem_by_slice`: same: members are a vector
TEST(Batch, IsATensorOrATuple) {
  const Batch single(number(1));
  EXPECT_FALSE(single.tuple);
  EXPECT_TRUE(single.tensor().equal(number(1)));
  const Batch one_tuple({c10::IValue(number(1))});
  EXPECT_TRUE(one_tuple.tuple) << "a tuple of one stays a tuple";
  EXPECT_EQ(one_tuple.size(), 1u);
  EXPECT_TRUE(one_tuple.tensor().equal(number(1)));
}

TEST(Batch, ThatIsNotATensorReportsItsMemberCount) {
  EXPECT_THAT(invalid_text([] { Batch({number(1), number(2)}).tensor(); }), HasSubstr("2 members"));
  EXPECT_THAT(invalid_text([] { Batch({c10::IValue(3)}).tensor(); }), HasSubstr("single tensor"));
  EXPECT_THAT(invalid_text([] { Batch().tensor(); }), HasSubstr("0 members"));
}

// peer: pipe test_microbatch batch_atomic
TEST(Batch, SharesItsTensors) {
  const at::Tensor tensor = number(1);
  const Batch batch(tensor);
  const std::vector<Batch> copies(2, batch);
  copies[1].tensor().fill_(7);
  EXPECT_TRUE(tensor.equal(number(7)));
}

// peer suite: pipe test_microbatch batch_atomic
TEST(BatchOf, TuplesAndPairsAreTuples) {
  using Mixed = std::tuple<at::Tensor, std::int64_t, bool, double>;
  const Batch batch = BatchOf<Mixed>::from({number(1), 2, true, 0.5});
  EXPECT_TRUE(batch.tuple);
  const auto [tensor, integer, flag, real] = BatchOf<Mixed>::to(batch);
  EXPECT_TRUE(tensor.equal(number(1)));
  EXPECT_EQ(integer, 2);
  EXPECT_TRUE(flag);
  EXPECT_EQ(real, 0.5);
  const Batch pair = BatchOf<std::pair<at::Tensor, int>>::from({number(3), 4});
  EXPECT_TRUE(pair.tuple);
  EXPECT_EQ((BatchOf<std::pair<at::Tensor, int>>::to(pair).second), 4);
  const Batch alone = BatchOf<std::tuple<at::Tensor>>::from({number(5)});
  EXPECT_TRUE(alone.tuple);
  EXPECT_EQ(alone.size(), 1u);
}

TEST(BatchOf, ListsOfTensorsAreTuplesOfAnyLength) {
  using List = std::vector<at::Tensor>;
  for (std::size_t length : {0u, 1u, 3u}) {
    List list;
    for (std::size_t i = 0; i < length; ++i) list.push_back(number(static_cast<double>(i)));
    const Batch batch = BatchOf<List>::from(list);
    EXPECT_TRUE(batch.tuple);
    EXPECT_EQ(BatchOf<List>::to(batch).size(), length);
  }
}

TEST(BatchOf, NothingIsAnUndefinedTensorOrAnEmptyOptional) {
  EXPECT_TRUE(BatchOf<at::Tensor>::from(at::Tensor()).members[0].isNone());
  EXPECT_FALSE(BatchOf<at::Tensor>::to(BatchOf<at::Tensor>::from(at::Tensor())).defined());
  using Maybe = std::optional<at::Tensor>;
  EXPECT_EQ(BatchOf<Maybe>::to(BatchOf<Maybe>::from(std::nullopt)), std::nullopt);
  EXPECT_TRUE(BatchOf<Maybe>::to(BatchOf<Maybe>::from(number(1)))->equal(number(1)));
  using Torch = c10::optional<at::Tensor>;
  EXPECT_FALSE(BatchOf<Torch>::to(BatchOf<Torch>::from(c10::nullopt)).has_value());
  using MaybeNumber = std::optional<std::int32_t>;
  EXPECT_EQ(BatchOf<MaybeNumber>::to(BatchOf<MaybeNumber>::from(-3)), -3);
}

TEST(BatchOf, NumbersKeepTheirSignAndPrecision) {
  EXPECT_EQ(BatchOf<std::int64_t>::to(BatchOf<std::int64_t>::from(-(1LL << 62))), -(1LL << 62));
  EXPECT_EQ(BatchOf<std::uint8_t>::to(BatchOf<std::uint8_t>::from(200)), 200);
  EXPECT_EQ(BatchOf<double>::to(BatchOf<double>::from(0.1)), 0.1);
  EXPECT_EQ(BatchOf<float>::to(BatchOf<float>::from(0.1F)), 0.1F);
  EXPECT_FALSE(BatchOf<bool>::to(BatchOf<bool>::from(false)));
}

TEST(BatchOf, AUserStructIsSentThroughItsSpecialization) {
  const Batch out = run(
      [](const Attended& in) {
        return Attended{in.hidden * 2, in.mask, in.heads + 1};
      },
      BatchOf<Attended>::from({number(1), at::Tensor(), 3}));
  const Attended result = BatchOf<Attended>::to(out);
  EXPECT_TRUE(result.hidden.equal(number(2)));
  EXPECT_FALSE(result.mask.defined());
  EXPECT_EQ(result.heads, 4);
}

TEST(LayerCalls, FitMembersToParametersInTheirOrder) {
  const Batch out =
      run([](const at::Tensor& a, std::int64_t b,
             const std::optional<at::Tensor>& c) { return std::make_tuple(a * b, c.has_value()); },
          Batch({number(2), std::int64_t{3}, c10::IValue()}));
  EXPECT_TRUE(out.members[0].toTensor().equal(number(6)));
  EXPECT_FALSE(out.members[1].toBool());
}

TEST(LayerCalls, GiveOneParameterTheWholeBatch) {
  const Batch two({number(1), number(2)});
  EXPECT_EQ(
      run([](const Batch& all) { return static_cast<std::int64_t>(all.size()); }, two).members[0].toInt(), 2);
  EXPECT_TRUE(
      run([](const std::vector<at::Tensor>& all) { return all[0] + all[1]; }, two).tensor().equal(number(3)));
  EXPECT_TRUE(run([](const std::tuple<at::Tensor, at::Tensor>& all) { return std::get<1>(all); }, two)
                  .tensor()
                  .equal(number(2)));
  EXPECT_TRUE(run([](Batch all) { return all; }, two).tuple);
}

TEST(LayerCalls, TakeATupleOfOneAsATensorToo) {
  EXPECT_TRUE(
      run([](const at::Tensor& x) { return x; }, Batch({c10::IValue(number(4))})).tensor().equal(number(4)));
}

TEST(LayerCalls, PassSkipsWhereverTheParameterStands) {
  Layers layers;
  layers.add_function("layer", [](Skips& skips, const at::Tensor& a, const at::Tensor& b) {
    skips.stash("s", a);
    return a + b;
  });
  Skips skips({}, {"s"});
  const Batch out = layers.uses()[0].call(nullptr, Batch({number(1), number(2)}), skips);
  EXPECT_TRUE(out.tensor().equal(number(3)));
  EXPECT_TRUE(skips.stashed().at("s").equal(number(1)));
}

TEST(LayerCalls, CountTheirInputs) {
  const auto sum = [](const at::Tensor& a, const at::Tensor& b) { return a + b; };
  EXPECT_THAT(invalid_text([&] { run(sum, number(1)); }),
              HasSubstr("the layer takes 2 values, but its input has 1"));
  EXPECT_THAT(invalid_text([&] { run(sum, Batch({number(1), number(2), number(3)})); }), HasSubstr("has 3"));
  EXPECT_THAT(invalid_text([&] {
                run([](const at::Tensor& x) { return x; }, Batch({number(1), number(2)}));
              }),
              HasSubstr("takes 1 values, but its input has 2"));
}

// peer: pipe input_pair
TEST(LayerCalls, NameTheTypeThatDoesNotFit) {
  const auto takes_tensor = [](const at::Tensor& x) { return x; };
  const auto takes_integer = [](std::int64_t x) { return x; };
  const auto takes_real = [](double x) { return x; };
  const auto takes_bool = [](bool x) { return x; };
  const Batch integer({c10::IValue(std::int64_t{3})}), real({c10::IValue(0.5)}), none({c10::IValue()});
  EXPECT_THAT(invalid_text([&] { run(takes_tensor, integer); }),
              HasSubstr("the layer takes a tensor, but its input is a value of type Int"));
  EXPECT_THAT(invalid_text([&] { run(takes_integer, number(1)); }),
              HasSubstr("takes an integer, but its input is a value"));
  EXPECT_THAT(invalid_text([&] { run(takes_integer, real); }), HasSubstr("type Double"));
  EXPECT_THAT(invalid_text([&] { run(takes_real, integer); }), HasSubstr("a floating-point number"));
  EXPECT_THAT(invalid_text([&] { run(takes_bool, none); }),
              HasSubstr("a bool, but its input is nothing (None)"));
}

// Descriptions of layers.

struct CountingImpl : torch::nn::Module {
  explicit CountingImpl(int* made) { ++*made; }
  at::Tensor forward(const at::Tensor& x) const { return x + 1; }
  at::Tensor twice(const at::Tensor& x) { return x + 2; }
};
TORCH_MODULE(Counting);

/// Not a module: any class with a forward can be a layer.
struct Plain {
  explicit Plain(double by) : by(by) {}
  at::Tensor forward(const at::Tensor& x) { return x * by; }
  double by;
};

TEST(Layers, BuildNothingUntilRequested) {
  int made = 0;
  Layers layers;
  const auto use = layers.add<Counting>(&made);
  layers.reuse(use);
  EXPECT_EQ(made, 0);
  const BuiltLayer built = layers.specs()[0].build();
  EXPECT_EQ(made, 1);
  ASSERT_NE(built.module, nullptr);
  Skips skips({}, {});
  EXPECT_TRUE(layers.uses()[0].call(built.object.get(), number(1), skips).tensor().equal(number(2)));
}

TEST(Layers, ShareALayerBetweenItsUses) {
  int made = 0;
  Layers layers;
  const auto first = layers.add<Counting>(&made).named("counting");
  layers.add<Plain>(3.0);
  layers.reuse(first);
  layers.reuse(first, "twice", &CountingImpl::twice);
  EXPECT_EQ(layers.specs().size(), 2u);
  EXPECT_EQ(layers.specs()[0].name, "counting");
  EXPECT_THAT(layers.specs()[1].name, HasSubstr("Plain"));
  ASSERT_EQ(layers.uses().size(), 4u);
  EXPECT_EQ(layers.uses()[3].layer, 0);
  EXPECT_EQ(layers.uses()[3].method, "twice");
  const BuiltLayer built = layers.specs()[0].build();
  Skips skips({}, {});
  EXPECT_TRUE(layers.uses()[2].call(built.object.get(), number(1), skips).tensor().equal(number(2)));
  EXPECT_TRUE(layers.uses()[3].call(built.object.get(), number(1), skips).tensor().equal(number(3)));
  EXPECT_EQ(layers.specs()[1].build().module, nullptr);
}

TEST(Layers, TakeFunctionsThatBuildAndCallALayer) {
  Layers layers;
  const auto factor = [](double by) {
    return [by](void* object, const Batch& input, LayerContext) {
      return Batch(input.tensor() * *static_cast<double*>(object) * by);
    };
  };
  const auto first = layers.add({"times",
                                 [] {
                                   return BuiltLayer{std::make_shared<double>(3), nullptr};
                                 }},
                                factor(1));
  layers.reuse(first);
  layers.reuse(first, "negative", factor(-1));
  EXPECT_EQ(layers.specs()[0].name, "times");
  EXPECT_EQ(layers.uses()[2].method, "negative");
  const BuiltLayer built = layers.specs()[0].build();
  Skips skips({}, {});
  const auto call = [&](std::size_t use) {
    return layers.uses()[use].call(built.object.get(), number(2), skips).tensor();
  };
  EXPECT_TRUE(call(0).equal(number(6)));
  EXPECT_TRUE(call(1).equal(number(6)));
  EXPECT_TRUE(call(2).equal(number(-6)));
}

TEST(Layers, DoNotRepeatTheSkipsOfAnEarlierUse) {
  int made = 0;
  Layers layers;
  const auto first = layers.add<Counting>(&made).stashes("a", "b").pops("c").in_space("x");
  EXPECT_EQ(layers.uses()[0].stashes, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(layers.uses()[0].pops, std::vector<std::string>{"c"});
  EXPECT_EQ(layers.uses()[0].space, "x");
  layers.reuse(first);
  EXPECT_TRUE(layers.uses()[1].stashes.empty());
  EXPECT_TRUE(layers.uses()[1].pops.empty());
  EXPECT_TRUE(layers.uses()[1].space.empty());
}

TEST(Layers, TakeModulesThatAreThereAndThoseOfLibTorch) {
  Layers layers;
  torch::nn::Linear linear(3, 2);
  layers.add_existing(linear);
  layers.add<torch::nn::Sequential>(torch::nn::Linear(2, 2), torch::nn::ReLU());
  layers.add<torch::nn::Dropout>(0.5);
  EXPECT_EQ(layers.specs()[0].build().module, linear.ptr());
  EXPECT_NE(layers.specs()[1].build().module, nullptr);
  Skips skips({}, {});
  const BuiltLayer sequence = layers.specs()[1].build();
  EXPECT_EQ(layers.uses()[1].call(sequence.object.get(), at::ones({4, 2}), skips).tensor().size(1), 2);
}

}  // namespace
}  // namespace torchspan::pipeline::batch_test
