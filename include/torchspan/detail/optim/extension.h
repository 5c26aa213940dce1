#pragma once
#include <memory>

#include <torchspan/detail/rpc/extension.h>
#include <torchspan/optim/functional.h>

namespace torchspan::optim {

/// The optimizers on one worker, next to their parameters. A Session includes one with the default table;
/// pass it your own to add kinds. Steps of different optimizers run in parallel unless they share a
/// parameter; then they run one at a time in order of arrival, and waiting steps hold no thread.
class OptimExtension final : public rpc::Extension {
 public:
  /// `table` holds the kinds that this worker can build; identical on all workers.
  explicit OptimExtension(OptimizerTable table = {});
  ~OptimExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// Number of optimizers on this worker.
  std::size_t count() const;

  class Impl;

 private:
  OptimizerTable table_;
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::optim
