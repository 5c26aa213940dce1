// Compares with values of PyTorch's Python optimizers and schedulers where LibTorch has no C++ counterpart.
// peer: dist_optimizer_test.py torch.optim update rules
#include <cstdint>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/optim/distributed_optimizer.h>

#include "optim/functional/golden_optim.h"

namespace torchspan::optim::golden_test {
namespace {

constexpr int kSteps = 200;
constexpr double kTolerance = 1e-10;

// Start values and gradients are those of tools/golden_optim.py.
at::Tensor values(std::int64_t count) {
  std::vector<double> list;
  for (std::int64_t i = 0; i < count; ++i) list.push_back(static_cast<double>((i * 37) % 101 - 50) / 64);
  return torch::tensor(list, torch::kDouble);
}

at::Tensor gradient(std::int64_t step, std::int64_t count) {
  std::vector<double> list;
  for (std::int64_t i = 0; i < count; ++i) {
    list.push_back(static_cast<double>((step * 7919 + i * 104729) % 257 - 128) / 64);
  }
  return torch::tensor(list, torch::kDouble);
}

at::Tensor sparse_gradient(std::int64_t step) {
  const std::vector<std::int64_t> rows = {(step * 5) % 4, (step * step) % 4, (step * 3 + 1) % 4};
  return torch::sparse_coo_tensor(torch::tensor(rows, torch::kLong).unsqueeze(0),
                                  gradient(step, 6).view({3, 2}), {4, 2});
}

void expect_golden(const std::string& name, const OptimizerSpec& spec) {
  SCOPED_TRACE(name);
  const bool sparse = spec.kind == "SparseAdam";
  const at::Tensor leaf = (sparse ? values(8).view({4, 2}) : values(6)).set_requires_grad(true);
  const auto optimizer = spec.build({leaf});
  for (std::int64_t step = 0; step < kSteps; ++step) {
    at::Tensor now;
    if (step % 3 != 2) now = sparse ? sparse_gradient(step) : gradient(step, 6);
    optimizer->step(std::vector<at::Tensor>{now});
  }
  const at::Tensor expected = torch::tensor(golden::kOptimizers.at(name), torch::kDouble);
  EXPECT_LE((leaf.detach().flatten() - expected).abs().max().item<double>(), kTolerance) << leaf << "\n"
                                                                                         << expected;
}

TEST(Golden, EveryOptimizerEqualsPyTorchsAfterTwoHundredSteps) {
  const std::map<std::string, OptimizerSpec> cases = {
      {"SGD(lr=0.01, maximize=True)", SGD{.lr = 0.01, .maximize = true}},
      {"SGD(lr=0.01, momentum=0.9, dampening=0.2, weight_decay=0.1, maximize=True)",
       SGD{.lr = 0.01, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1, .maximize = true}},
      {"Adam(maximize=True, weight_decay=0.1)", Adam{.weight_decay = 0.1, .maximize = true}},
      {"Adam(amsgrad=True, maximize=True)", Adam{.amsgrad = true, .maximize = true}},
      {"AdamW(maximize=True)", AdamW{.maximize = true}},
      {"AdamW(amsgrad=True, weight_decay=0.1, maximize=True)",
       AdamW{.weight_decay = 0.1, .amsgrad = true, .maximize = true}},
      {"Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5, maximize=True)",
       Adagrad{.lr = 0.1, .lr_decay = 0.01, .initial_accumulator_value = 0.5, .maximize = true}},
      {"Adadelta()", Adadelta{}},
      {"Adadelta(lr=0.5, rho=0.8, eps=1e-3)", Adadelta{.lr = 0.5, .rho = 0.8, .eps = 1e-3}},
      {"Adadelta(weight_decay=0.1)", Adadelta{.weight_decay = 0.1}},
      {"Adadelta(maximize=True, weight_decay=0.2)", Adadelta{.weight_decay = 0.2, .maximize = true}},
      {"RMSprop(maximize=True)", RMSprop{.maximize = true}},
      {"RMSprop(centered=True, momentum=0.9, weight_decay=0.1, maximize=True)",
       RMSprop{.weight_decay = 0.1, .momentum = 0.9, .centered = true, .maximize = true}},
      {"Rprop()", Rprop{}},
      {"Rprop(lr=0.1, etas=(0.4, 1.5), step_sizes=(1e-3, 0.5))",
       Rprop{.lr = 0.1, .eta_minus = 0.4, .eta_plus = 1.5, .step_min = 1e-3, .step_max = 0.5}},
      {"Rprop(maximize=True)", Rprop{.maximize = true}},
      {"Adamax()", Adamax{}},
      {"Adamax(lr=0.1, betas=(0.8, 0.95), eps=1e-3)",
       Adamax{.lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3}},
      {"Adamax(weight_decay=0.1)", Adamax{.weight_decay = 0.1}},
      {"Adamax(maximize=True, weight_decay=0.2)", Adamax{.weight_decay = 0.2, .maximize = true}},
      {"SparseAdam()", SparseAdam{}},
      {"SparseAdam(lr=0.1, betas=(0.8, 0.95), eps=1e-3)",
       SparseAdam{.lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3}},
      {"SparseAdam(maximize=True)", SparseAdam{.maximize = true}},
  };
  EXPECT_EQ(cases.size(), golden::kOptimizers.size());
  for (const auto& [name, spec] : cases) expect_golden(name, spec);
}

void expect_rates(const std::string& name, const LRLambda& schedule) {
  const std::vector<double>& expected = golden::kSchedules.at(name);
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_NEAR(schedule(static_cast<std::int64_t>(step)), expected[step], kTolerance)
        << name << " at step " << step;
  }
}

// peer: dist_optimizer_test.py `lr_scheduler` (StepLR, CosineAnnealingLR, OneCycleLR): same; also on all
//   owners, which the peer lacks
TEST(Golden, SchedulesEqualPyTorchs) {
  expect_rates("step", StepLR{.step_size = 7, .gamma = 0.3});
  expect_rates("cosine", CosineAnnealingLR{.t_max = 40, .eta_min_factor = 0.1});
  expect_rates("one_cycle", OneCycleLR{.total_steps = 40});
}

}  // namespace
}  // namespace torchspan::optim::golden_test
