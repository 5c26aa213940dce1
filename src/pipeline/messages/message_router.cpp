#include "pipeline/messages/message_router.h"

#include <fmt/format.h>

#include <torchspan/wire.h>

namespace torchspan::pipeline {

std::uint64_t PipelineExtension::MessageRouter::next_number(const std::string& name,
                                                            const std::string& workers) {
  MutexLock lock(mutex_);
  return next_numbers_[name + '\n' + workers];
}

PipelineExtension::MessageRouter::Opened PipelineExtension::MessageRouter::open(
    const std::string& name, const std::string& workers, std::uint64_t number,
    std::weak_ptr<FutureHost> host) {
  MutexLock lock(mutex_);
  const std::string key = name + '\n' + workers;
  Opened opened;
  opened.id = wire::digest(fmt::format("{}\n{}", key, number));
  next_numbers_[key] = number + 1;
  opened.event_queue = std::make_shared<EventQueue>(name, std::move(host));
  std::erase_if(event_queues_, [](const auto& entry) { return entry.second.expired(); });
  event_queues_[opened.id] = opened.event_queue;
  return opened;
}

std::shared_ptr<EventQueue> PipelineExtension::MessageRouter::find(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = event_queues_.find(id);
  auto event_queue = found == event_queues_.end() ? nullptr : found->second.lock();
  if (!event_queue) {
    throw Error(ErrorKind::kInvalid,
                "this worker has no such pipeline: it was destroyed here while another worker still uses it");
  }
  return event_queue;
}

void PipelineExtension::MessageRouter::departed(std::uint32_t rank, const Error& error) {
  std::vector<std::shared_ptr<EventQueue>> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, weak] : event_queues_) {
      if (auto event_queue = weak.lock()) all.push_back(std::move(event_queue));
    }
  }
  for (const auto& event_queue : all) event_queue->put(Departure{rank, error});
}

TimePoint PipelineExtension::MessageRouter::now() const {
  const auto worker = worker_.lock();
  return worker ? worker->runtime().executor.now() : TimePoint();
}

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
  registrar.handle<AskInitialValues>(rpc::RunOn::kPool,
                                     [router = router_](const rpc::CallInfo&, const AskInitialValues& ask) {
                                       return router->find(ask.id.pipeline)->offered(ask.which);
                                     });
  registrar.on_departure(
      [router = router_](std::uint32_t rank, const Error& reason) { router->departed(rank, reason); });
}

}  // namespace torchspan::pipeline
