#pragma once
#include <memory>

#include <torchspan/detail/rpc/extension.h>

namespace torchspan::checkpoint {

/// Saves and restores values of this worker for checkpoint managers of other workers. A Session includes one.
class CheckpointExtension final : public rpc::Extension {
 public:
  CheckpointExtension();
  ~CheckpointExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// Number of snapshots that are not written yet.
  std::size_t snapshots() const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::checkpoint
