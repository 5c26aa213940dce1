#include "pipeline/office.h"

#include <fmt/format.h>

#include <torchspan/wire/wire.h>

namespace torchspan::pipeline {

Pipelines::Office::Opened Pipelines::Office::open(const std::string& name, const std::string& workers,
                                                  std::weak_ptr<FutureHost> host) {
  MutexLock lock(mutex_);
  const std::string key = name + '\n' + workers;
  Opened opened;
  opened.id = wire::digest(fmt::format("{}\n{}", key, counts_[key]++));
  opened.mailbox = std::make_shared<Mailbox>(name, std::move(host));
  std::erase_if(mailboxes_, [](const auto& entry) { return entry.second.expired(); });
  mailboxes_[opened.id] = opened.mailbox;
  return opened;
}

std::shared_ptr<Mailbox> Pipelines::Office::find(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = mailboxes_.find(id);
  auto mailbox = found == mailboxes_.end() ? nullptr : found->second.lock();
  if (!mailbox) {
    throw Error(ErrorKind::kInvalid,
                "this worker has no such pipeline: it was destroyed here while another worker still uses it");
  }
  return mailbox;
}

void Pipelines::Office::departed(std::uint32_t rank, const Error& error) {
  std::vector<std::shared_ptr<Mailbox>> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, weak] : mailboxes_) {
      if (auto mailbox = weak.lock()) all.push_back(std::move(mailbox));
    }
  }
  for (const auto& mailbox : all) mailbox->put(Departure{rank, error});
}

TimePoint Pipelines::Office::now() const {
  const auto worker = worker_.lock();
  return worker ? worker->runtime().executor.now() : TimePoint();
}

Pipelines::Pipelines() = default;
Pipelines::~Pipelines() = default;

namespace {

template <rpc::Message M>
void take_in(rpc::Registrar& registrar, const std::shared_ptr<Pipelines::Office>& office) {
  registrar.handle<M>(rpc::RunOn::kReceiver, [office](const rpc::CallInfo&, M message) {
    if constexpr (std::is_same_v<M, StepBegin>) message.arrived = office->now();
    const auto mailbox = office->find(message.id.pipeline);
    mailbox->put(std::move(message));
    return Unit{};
  });
}

}  // namespace

void Pipelines::attach(rpc::Registrar& registrar) {
  office_ = std::make_shared<Office>(registrar.worker());
  take_in<StepBegin>(registrar, office_);
  take_in<Activations>(registrar, office_);
  take_in<Gradients>(registrar, office_);
  take_in<StepFailed>(registrar, office_);
  take_in<PartDone>(registrar, office_);
  take_in<StepClosed>(registrar, office_);
  take_in<Credit>(registrar, office_);
  registrar.handle<AskState>(rpc::RunOn::kReceiver,
                             [office = office_](const rpc::CallInfo&, const AskState& ask) {
                               return office->find(ask.id.pipeline)->state(office->now());
                             });
  registrar.on_departure(
      [office = office_](std::uint32_t rank, const Error& reason) { office->departed(rank, reason); });
}

}  // namespace torchspan::pipeline
