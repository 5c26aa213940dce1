#include "elastic/transfer/tracked_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>

#include "tests/support/errors.h"

namespace torchspan::elastic::tracked_state_test {

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
  EXPECT_THAT(refusal("module.ema"), HasSubstr("as 'module.ema' beside 'module': choose"));
  EXPECT_THAT(refusal("steps"), HasSubstr("as 'steps' beside 'steps.first': choose"));
  state.add("steps", checkpoint::source_of(number));  // has one value, of this name
}

}  // namespace torchspan::elastic::tracked_state_test
