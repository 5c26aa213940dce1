#pragma once
// Shared by the tests of pipelines: comparison with the same model in one process.
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/random_model.h"
#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::testing {

using torchspan::testing::on_workers;

inline at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

/// A schedule for any plan that computes input and weight gradients apart.
inline PipelineOptions with_split_backwards(PipelineOptions options) {
  options.schedule = Schedule::kCustom;
  options.custom_schedule = [](const schedule::Placement& placement) {
    return schedule::zero_bubble(placement, {schedule::Costs{}});
  };
  return options;
}

/// Runs `body` with every combination of schedule and activation checkpointing.
inline void in_every_way(const std::function<void(PipelineOptions)>& body) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B, Schedule::kCustom}) {
    for (const ActivationCheckpoint checkpoint :
         {ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways}) {
      SCOPED_TRACE(::testing::Message() << "schedule " << static_cast<int>(schedule) << ", checkpoint "
                                        << static_cast<int>(checkpoint));
      PipelineOptions options;
      options.micro_batches = 4;
      options.schedule = schedule;
      options.checkpoint = checkpoint;
      body(schedule == Schedule::kCustom ? with_split_backwards(options) : options);
    }
  }
}

inline void expect_close(const at::Tensor& ours, const at::Tensor& expected, double tolerance = 1e-12) {
  ASSERT_EQ(ours.defined(), expected.defined());
  if (!ours.defined()) return;
  ASSERT_EQ(ours.sizes(), expected.sizes());
  EXPECT_TRUE(at::allclose(ours, expected, tolerance, tolerance)) << ours << "\nexpected " << expected;
}

/// Expects the gradients of this worker's layers to equal those of `twins`, by layer; null: not compared.
inline void expect_gradients(const Pipeline& pipe,
                             const std::vector<std::shared_ptr<torch::nn::Module>>& twins) {
  for (std::size_t layer = 0; layer < twins.size(); ++layer) {
    const auto module = pipe.module(static_cast<int>(layer));
    if (!module || !twins[layer]) continue;
    const auto ours = module->named_parameters();
    for (const auto& parameter : twins[layer]->named_parameters()) {
      SCOPED_TRACE(::testing::Message() << "layer " << layer << ", " << parameter.key());
      expect_close(ours[parameter.key()].grad(), parameter.value().grad());
    }
  }
}

/// The text of the Error that `body` throws.
inline std::string error_text(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace torchspan::pipeline::testing
