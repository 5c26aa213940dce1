#include "pipeline/runtime/step_batch.h"

#include <gtest/gtest.h>
#include <vector>

#include <torch/torch.h>

namespace torchspan::pipeline::step_batch_test {

/// A micro-batch's output: a tensor with rows, and one without that wants no gradient.
Activation output_of(const at::Tensor& rows, double scalar, bool wants) {
  return {Batch({rows, at::full({}, scalar)}), {static_cast<std::uint8_t>(wants ? 1 : 0), 0}};
}

TEST(StepOutput, JoinsRowsAndStacksTensorsWithoutThem) {
  StepOutput output(2);
  output.put(1, output_of(at::full({1, 3}, 2.0), 20, true));
  output.put(0, output_of(at::full({2, 3}, 1.0), 10, true));
  const Batch whole = output.take();
  const at::Tensor first = whole.members.at(0).toTensor(), second = whole.members.at(1).toTensor();
  EXPECT_EQ(first.sizes(), (std::vector<std::int64_t>{3, 3}));
  EXPECT_EQ(first.sum().item<double>(), 2 * 3 * 1 + 3 * 2);
  EXPECT_TRUE(first.is_leaf() && first.requires_grad());
  EXPECT_TRUE(at::equal(second, at::tensor({10.0, 20.0}, second.options())));
  EXPECT_FALSE(second.requires_grad());
}

TEST(StepOutput, SplitsGradientsAsItJoinsOutputs) {
  StepOutput output(2);
  output.put(0, output_of(at::zeros({2, 3}), 0, true));
  output.put(1, output_of(at::zeros({1, 3}), 0, false));
  EXPECT_TRUE(output.wants_gradients(0));
  EXPECT_FALSE(output.wants_gradients(1));
  const at::Tensor rows = at::arange(9).reshape({3, 3}), scalars = at::arange(2);
  const auto parts = output.split({rows, scalars});
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_TRUE(at::equal(parts[0].at(0), rows.narrow(0, 0, 2)));
  EXPECT_TRUE(at::equal(parts[1].at(0), rows.narrow(0, 2, 1)));
  EXPECT_TRUE(at::equal(parts[1].at(1), scalars[1]));
  EXPECT_FALSE(output.split({at::Tensor(), scalars})[0].at(0).defined());
}

TEST(StepOutput, PassesTheOutputOfASingleMicroBatchOn) {
  StepOutput output(1);
  output.put(0, output_of(at::zeros({2, 3}), 5, false));
  EXPECT_EQ(output.take().members.at(1).toTensor().dim(), 0);
  const at::Tensor scalar = at::full({}, 7.0);
  EXPECT_TRUE(output.split({at::Tensor(), scalar})[0].at(1).is_same(scalar));
}

}  // namespace torchspan::pipeline::step_batch_test
