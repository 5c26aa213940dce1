#pragma once
// The program of one rank of a training.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/sharded.h>

#include "tests/combinations/training_case.h"
#include "tests/combinations/training_model.h"
#include "tests/combinations/training_oracle.h"
#include "tests/support/ranks.h"

namespace torchspan::combinations {

/// One rank of a phase. Expects the losses and norms of the oracle in each step.
class Trainer {
 public:
  /// `first_step`: of the phase.
  Trainer(const Case& one, std::size_t phase, const testing::Rank& self, int first_step);

  /// Runs the phase's steps. Throws if a rank's exception ends the training (Case::ends()).
  void run(const Expected& expected);
  /// What a checkpoint has, by name.
  std::vector<std::pair<std::string, checkpoint::SourcePtr>> sources();
  /// Whether this rank throws the exception that ends the training.
  bool ends_training() const { return one_.ends() && throws_here(); }

 private:
  std::optional<collective::Group> parts_group() const;
  bool throws_here() const;
  void train(int step, const Expected& expected);
  void run_pass(int step, int pass, const Expected& expected, bool fails);
  at::Tensor forward(const Batch& batch);
  void compute(Batch batch, int step, int pass, const Expected& expected, bool fails);
  void update(int step, const Expected& expected, const std::string& where);
  void zero_grad();
  double tolerance() const { return one_.single ? 1e-4 : 1e-9; }
  void expect_near(const at::Tensor& got, const at::Tensor& wanted, const char* what);

  const Case& one_;
  const Phase& phase_;
  const testing::Rank self_;
  const int first_, rank_;
  Net net_;
  std::optional<DistributedDataParallel<Net>> replicas_;
  std::optional<FullyShardedDataParallel<Net>> sharded_;
  std::unique_ptr<optim::Optimizer> optimizer_, own_;
  std::unique_ptr<ZeroRedundancyOptimizer> zero_;
  std::optional<optim::GradScaler> scaler_;
  std::optional<optim::LRScheduler> schedule_;
};

}  // namespace torchspan::combinations
