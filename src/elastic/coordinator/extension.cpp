#include <torchspan/detail/elastic/extension.h>
#include <torchspan/rpc/worker.h>

#include "elastic/coordinator/coordinator.h"

namespace torchspan::elastic {

ElasticExtension::ElasticExtension() = default;
ElasticExtension::~ElasticExtension() = default;

void ElasticExtension::attach(rpc::Registrar& registrar) {
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
  registrar.on_departure([coordinator = coordinator_](std::uint32_t rank, const Error& reason) {
    coordinator->departed(static_cast<int>(rank), reason.message());
  });
}

bool ElasticExtension::is_awaited(const std::string& trainer) const {
  return coordinator_->is_awaited(trainer);
}

}  // namespace torchspan::elastic
