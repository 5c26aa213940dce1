#include <torchspan/detail/quorum/extension.h>
#include <torchspan/rpc/worker.h>

#include "quorum/coordinator/coordinator.h"

namespace torchspan::quorum {

QuorumExtension::QuorumExtension() = default;
QuorumExtension::~QuorumExtension() = default;

void QuorumExtension::attach(rpc::Registrar& registrar) {
  coordinator_ = std::make_shared<Coordinator>(registrar.worker().endpoint()->weak_from_this());
  registrar.handle<AwaitGeneration>(
      rpc::RunOn::kPool,
      [coordinator = coordinator_](const rpc::CallInfo& call, const AwaitGeneration& message) {
        return coordinator->next(static_cast<int>(call.peer), message);
      });
  registrar.handle<Withdraw>(
      rpc::RunOn::kPool, [coordinator = coordinator_](const rpc::CallInfo& call, const Withdraw& message) {
        coordinator->withdraw(static_cast<int>(call.peer), message);
        return Unit();
      });
  registrar.handle<AskAwaited>(
      rpc::RunOn::kPool, [coordinator = coordinator_](const rpc::CallInfo& call, const AskAwaited& message) {
        return coordinator->is_over_for(static_cast<int>(call.peer), message.trainer);
      });
  registrar.on_departure([coordinator = coordinator_](std::uint32_t rank, const Error& reason) {
    coordinator->departed(static_cast<int>(rank), reason.message());
  });
}

std::uint64_t QuorumExtension::departures(int rank) const { return coordinator_->departures(rank); }

bool QuorumExtension::is_over(const std::string& trainer) const {
  return coordinator_->is_over_for(/*rank=*/0, trainer);
}

}  // namespace torchspan::quorum
