#include <torchspan/detail/pipeline/extension.h>

#include "pipeline/messages/message_router.h"

namespace torchspan::pipeline {

PipelineExtension::PipelineExtension() = default;
PipelineExtension::~PipelineExtension() = default;

namespace {

template <rpc::Message M>
void queue_messages(rpc::Registrar& registrar,
                    const std::shared_ptr<PipelineExtension::MessageRouter>& router) {
  registrar.handle<M>(rpc::RunOn::kReceiver, [router](const rpc::CallInfo&, M message) {
    if constexpr (std::is_same_v<M, StepBegin>) message.arrived = router->now();
    const auto event_queue = router->find(message.id.pipeline);
    event_queue->put(std::move(message));
    return Unit{};
  });
}

}  // namespace

void PipelineExtension::attach(rpc::Registrar& registrar) {
  router_ = std::make_shared<MessageRouter>(registrar.worker());
  queue_messages<StepBegin>(registrar, router_);
  queue_messages<Activations>(registrar, router_);
  queue_messages<Gradients>(registrar, router_);
  queue_messages<StepFailed>(registrar, router_);
  queue_messages<PartDone>(registrar, router_);
  queue_messages<StepClosed>(registrar, router_);
  queue_messages<Credit>(registrar, router_);
  queue_messages<TiedGradient>(registrar, router_);
  queue_messages<ReplicaGradients>(registrar, router_);
  queue_messages<ReplicaStatistics>(registrar, router_);
  queue_messages<ReplicaDone>(registrar, router_);
  queue_messages<ReplicaBegin>(registrar, router_);
  registrar.handle<AskState>(rpc::RunOn::kReceiver,
                             [router = router_](const rpc::CallInfo&, const AskState& ask) {
                               return router->find(ask.id.pipeline)->state(router->now());
                             });
  registrar.on_departure(
      [router = router_](std::uint32_t rank, const Error& reason) { router->departed(rank, reason); });
}

}  // namespace torchspan::pipeline
