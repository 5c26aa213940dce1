#include "quorum/coordinator/coordinator.h"

#include <fmt/format.h>
#include <set>

namespace torchspan::quorum {

std::shared_ptr<rpc::Endpoint> Coordinator::endpoint() const {
  auto endpoint = endpoint_.lock();
  if (!endpoint)
    throw Error(ErrorKind::kCancelled, "rank 0, which decides about generations, is shutting down");
  return endpoint;
}

Future<GenerationAnswer> Coordinator::next(int rank, const AwaitGeneration& message) {
  const auto endpoint = this->endpoint();
  if (endpoint->self().rank != 0) {
    throw_invalid(
        fmt::format("rank {} asked rank {} for a generation of the elastic trainer '{}': only rank 0 decides",
                    rank, endpoint->self().rank, message.trainer));
  }
  const auto call = std::make_shared<Call>(endpoint->host());
  std::shared_ptr<Call> replaced;  // destroyed without the lock
  {
    MutexLock lock(mutex_);
    Trainer& trainer = this->trainer(message.trainer, *endpoint);
    replaced = std::exchange(trainer.calls[rank], call);
    const TimePoint now = endpoint->runtime().executor.now();
    trainer.table->report(rank, message.report, now);
    // Its process may have ended while this report was on its way.
    const bool present = rank == 0 || endpoint->is_present(static_cast<std::uint32_t>(rank));
    if (!present) trainer.table->gone(rank, "its process ended", now);
  }
  settle(*endpoint);
  return call->future();
}

void Coordinator::withdraw(int rank, const Withdraw& message) {
  const auto endpoint = this->endpoint();
  {
    MutexLock lock(mutex_);
    const auto found = trainers_.find(message.trainer);
    if (found == trainers_.end()) return;
    found->second.table->gone(rank, "its run() threw: " + message.why, endpoint->runtime().executor.now());
  }
  settle(*endpoint);
}

void Coordinator::departed(int rank, const std::string& why) {
  const auto endpoint = endpoint_.lock();
  if (!endpoint) return;
  {
    MutexLock lock(mutex_);
    ++departures_[rank];
    for (auto& [name, trainer] : trainers_)
      trainer.table->gone(rank, why, endpoint->runtime().executor.now());
  }
  settle(*endpoint);
}

std::uint64_t Coordinator::departures(int rank) const {
  MutexLock lock(mutex_);
  const auto found = departures_.find(rank);
  return found == departures_.end() ? 0 : found->second;
}

bool Coordinator::is_over_for(int rank, const std::string& trainer) const {
  MutexLock lock(mutex_);
  const auto found = trainers_.find(trainer);
  return found != trainers_.end() && found->second.table->is_over_for(rank);
}

Coordinator::Trainer& Coordinator::trainer(const std::string& name, rpc::Endpoint& endpoint) {
  Trainer& trainer = trainers_[name];
  if (trainer.table) return trainer;
  const auto workers = endpoint.workers();
  std::set<int> ranks;
  for (const WorkerInfo& worker : workers) ranks.insert(static_cast<int>(worker.rank));
  trainer.table = std::make_unique<Generations>(
      std::move(ranks),
      Generations::Answers{.announce =
                               [this, name](int rank, const Generation& generation) TORCHSPAN_UNCHECKED {
                                 answer(name, rank, {generation, std::nullopt});
                               },
                           .refuse =
                               [this, name](int rank, const Error& error) TORCHSPAN_UNCHECKED {
                                 answer(name, rank, {{}, error});
                               }});
  for (const WorkerInfo& worker : workers) {
    if (worker.rank == endpoint.self().rank || endpoint.is_present(worker.rank)) continue;
    trainer.table->gone(static_cast<int>(worker.rank), "its process ended",
                        endpoint.runtime().executor.now());
  }
  return trainer;
}

void Coordinator::answer(const std::string& name, int rank, GenerationAnswer answer) {
  Trainer& trainer = trainers_.at(name);
  const auto call = trainer.calls.find(rank);
  if (call == trainer.calls.end()) return;
  answers_.emplace_back(std::move(call->second), std::move(answer));
  trainer.calls.erase(call);
}

void Coordinator::settle(rpc::Endpoint& endpoint) {
  std::vector<Answer> answers;
  Deadline tick_at;
  {
    MutexLock lock(mutex_);
    answers.swap(answers_);
    Deadline next;
    for (const auto& [name, trainer] : trainers_) next = earlier(next, trainer.table->next_deadline());
    if (next < tick_at_) tick_at = tick_at_ = next;
  }
  for (auto& [call, value] : answers) call->set_value(std::move(value));
  if (tick_at.is_never()) return;
  endpoint.after(tick_at.left(endpoint.runtime().executor.now()), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tick();
  });
}

void Coordinator::tick() {
  const auto endpoint = endpoint_.lock();
  if (!endpoint) return;
  {
    MutexLock lock(mutex_);
    tick_at_ = Deadline::never();
    for (auto& [name, trainer] : trainers_) trainer.table->tick(endpoint->runtime().executor.now());
  }
  settle(*endpoint);
}

}  // namespace torchspan::quorum
