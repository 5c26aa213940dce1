#pragma once
#include <memory>

#include <torchspan/detail/rpc/extension.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// The optimizers that live on one worker beside their parameters: an extension to give to its Session (which
/// has it by default). Steps of different optimizers run in parallel, unless they share a parameter:
/// then one after the other, in the order they came, and no thread is held by those that wait.
class OptimExtension final : public rpc::Extension {
 public:
  /// `table` holds the kinds that this worker can build; the same on all workers.
  explicit OptimExtension(OptimizerTable table = {});
  ~OptimExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// How many optimizers live here.
  std::size_t count() const;

  class Impl;

 private:
  OptimizerTable table_;
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::optim
