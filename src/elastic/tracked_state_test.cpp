#include "elastic/tracked_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::elastic::tracked_state_test {
namespace {

StateListing example() {
  StateListing listing{.position = {7, 2, 30}, .tensors = {}, .values = {}};
  listing.tensors.push_back({"module.weight", at::kDouble, {3, 4}});
  listing.tensors.push_back({"optimizer.lr", at::kFloat, {}});
  listing.values = {{"a", true}, {"b", std::int64_t{-5}}, {"c", 0.25}, {"d", std::string("text")}};
  return listing;
}

TEST(StateListing, ArrivesAsItWasSent) { EXPECT_EQ(StateListing::decode(example().encode()), example()); }

TEST(StateListing, RejectsEveryTruncationAndSurvivesEveryDamage) {
  const Bytes bytes = example().encode();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(StateListing::decode(BytesView(bytes).first(size)), Error) << size;
  std::mt19937_64 random(1);
  for (int i = 0; i < 5000; ++i) {
    Bytes damaged = bytes;
    damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    try {
      for (const auto& entry : StateListing::decode(damaged).tensors) {
        for (const std::int64_t size : entry.shape) ASSERT_GE(size, 0);
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kInvalid);
    }
  }
}

}  // namespace

using ::testing::HasSubstr;
using torchspan::testing::invalid_text;

TEST(TrackedState, RefusesNamesThatItCouldNotTellApart) {
  TrackedState state;
  std::int64_t number = 0;
  const torch::nn::Linear layer(1, 1);
  const auto add = [&](const char* name) { state.add(name, checkpoint::source_of(layer)); };
  const auto refusal = [&](const char* name) { return invalid_text([&] { add(name); }); };
  add("module");
  add("module_ema");
  add("steps.first");
  EXPECT_THAT(refusal("module"), HasSubstr("under the taken name 'module'"));
  EXPECT_THAT(refusal(""), HasSubstr("under the empty name"));
  EXPECT_THAT(refusal("module.ema"), HasSubstr("'module.ema' cannot be registered together with 'module'"));
  EXPECT_THAT(refusal("steps"), HasSubstr("'steps.first' cannot be registered together with 'steps'"));
  state.add("steps", checkpoint::source_of(number));  // has one value, of this name
}

TEST(TrackedState, ArrivesWithTheValuesOfConjugatedAndNegatedTensors) {
  const at::Tensor values = at::arange(10, at::kFloat).view({5, 2});
  const at::Tensor complex = at::view_as_complex(values);
  torchspan::testing::on_shared_memory_ranks(2, [&](const torchspan::testing::Rank& self) {
    const bool sends = self.rank == 0;
    at::Tensor conjugated = sends ? complex.conj() : at::zeros_like(complex);
    at::Tensor negated = sends ? at::imag(complex.conj()) : at::zeros({5});
    EXPECT_TRUE(!sends || (conjugated.is_conj() && negated.is_neg()));
    TrackedState state;
    state.add("conjugated", checkpoint::source_of(conjugated));
    state.add("negated", checkpoint::source_of(negated));
    ElasticPosition position;
    state.copy_from_first(self.group, position);
    EXPECT_TRUE(at::equal(conjugated.resolve_conj(), complex.conj().resolve_conj())) << self.rank;
    EXPECT_TRUE(at::equal(negated.resolve_neg(), values.select(1, 1).neg())) << self.rank;
  });
}

}  // namespace torchspan::elastic::tracked_state_test
