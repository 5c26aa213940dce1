#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/quorum/extension.h>
#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/rpc/worker.h>

#include "core/api/throw_invalid.h"
#include "quorum/generations.h"
#include "quorum/messages.h"

namespace torchspan::quorum {
namespace {
/// How long rank 0 waits until the other ranks that were refused know it: its program may end with its own refusal.
constexpr Duration kRefusalLimit = std::chrono::seconds(5);
}  // namespace

/// Rank 0's tables of generations, one for each trainer, with the calls that wait for their answers; every worker has
/// one, which counts the processes that ended. Thread-safe.
class Coordinator : public std::enable_shared_from_this<Coordinator> {
 public:
  explicit Coordinator(std::weak_ptr<rpc::WorkerBackend> backend) : backend_(std::move(backend)) {}

  Future<GenerationAnswer> next(int rank, const AwaitGeneration& message) {
    const auto backend = this->backend();
    if (backend->self().rank != 0) {
      throw_invalid("rank {} asked rank {} for a generation of the elastic trainer '{}': only rank 0 decides",
                    rank, backend->self().rank, message.trainer);
    }
    const auto call = std::make_shared<Call>(backend->continuations());
    std::shared_ptr<Call> replaced, dropped;  // destroyed without the lock
    {
      MutexLock lock(mutex_);
      Trainer& trainer = this->trainer(message.trainer, *backend);
      trainer.refused.erase(rank);
      replaced = std::exchange(trainer.calls[rank], call);
      const TimePoint now = backend->runtime().executor.now();
      trainer.table->report(rank, message.report, now);
      // Its process may have ended while this report was on its way.
      const bool present = rank == 0 || backend->is_present(static_cast<std::uint32_t>(rank));
      if (!present) {
        trainer.table->gone(rank, "its process ended", now);
        // departed() has run, perhaps before this report: nobody else drops the call.
        if (const auto waits = trainer.calls.extract(rank)) dropped = waits.mapped();
      }
    }
    settle(*backend);
    return call->future();
  }

  void withdraw(int rank, const Withdraw& message) {
    const auto backend = this->backend();
    {
      MutexLock lock(mutex_);
      const auto found = trainers_.find(message.trainer);
      if (found == trainers_.end()) return;
      found->second.refused.erase(rank);
      found->second.table->gone(rank, "its run() threw: " + message.why, backend->runtime().executor.now());
    }
    settle(*backend);
  }

  /// The process of a rank has ended, or this worker stops. Drops the rank's call, which keeps the backend
  /// alive and with it this object; when stopping, also the call of rank 0 itself.
  void departed(int rank, const std::string& why) {
    const auto backend = backend_.lock();
    if (!backend) return;
    std::vector<std::shared_ptr<Call>> dropped;  // destroyed without the lock
    {
      MutexLock lock(mutex_);
      ++departures_[rank];
      for (auto& [name, trainer] : trainers_) {
        trainer.refused.erase(rank);
        if (trainer.held && backend->is_stopping()) {
          dropped.push_back(std::move(trainer.held->first));
          trainer.held.reset();
        }
        trainer.table->gone(rank, why, backend->runtime().executor.now());
        for (const int caller : {rank, backend->is_stopping() ? 0 : rank}) {
          const auto call = trainer.calls.find(caller);
          if (call == trainer.calls.end()) continue;
          dropped.push_back(std::move(call->second));
          trainer.calls.erase(call);
        }
      }
    }
    settle(*backend);
  }

  /// How many processes of a rank have ended, as far as this worker knows.
  std::uint64_t departures(int rank) const {
    MutexLock lock(mutex_);
    const auto found = departures_.find(rank);
    return found == departures_.end() ? 0 : found->second;
  }

  /// See QuorumExtension::claim().
  void claim(const std::string& trainer) {
    MutexLock lock(mutex_);
    if (claimed_.insert(trainer).second) return;
    throw_invalid(
        "an elastic trainer named '{}' has trained before in this process: call run() of that object again, "
        "or give this "
        "one another ElasticOptions::name, on all ranks",
        trainer);
  }

  /// See Generations::is_over_for(). False if no rank has reported to this trainer.
  bool is_over_for(int rank, const std::string& trainer) const {
    MutexLock lock(mutex_);
    const auto found = trainers_.find(trainer);
    return found != trainers_.end() && found->second.table->is_over_for(rank);
  }

 private:
  using Call = Promise<GenerationAnswer>;
  using Answer = std::pair<std::shared_ptr<Call>, GenerationAnswer>;
  struct Trainer {
    std::unique_ptr<Generations> table;
    std::map<int, std::shared_ptr<Call>> calls;  ///< by rank: its latest
    std::set<int> refused;                       ///< other ranks that may not know yet that they were refused
    std::optional<Answer> held;                  ///< rank 0's own refusal, until `refused` is empty
    Deadline held_until;
  };

  std::shared_ptr<rpc::WorkerBackend> backend() const {
    auto backend = backend_.lock();
    if (!backend)
      throw Error(ErrorKind::kCancelled, "rank 0, which decides about generations, is shutting down");
    return backend;
  }

  Trainer& trainer(const std::string& name, rpc::WorkerBackend& backend) TORCHSPAN_REQUIRES(mutex_) {
    Trainer& trainer = trainers_[name];
    if (trainer.table) return trainer;
    const auto workers = backend.workers();
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
      if (worker.rank == backend.self().rank || backend.is_present(worker.rank)) continue;
      trainer.table->gone(static_cast<int>(worker.rank), "its process ended",
                          backend.runtime().executor.now());
    }
    return trainer;
  }

  void answer(const std::string& name, int rank, GenerationAnswer answer) TORCHSPAN_REQUIRES(mutex_) {
    Trainer& trainer = trainers_.at(name);
    const auto call = trainer.calls.find(rank);
    if (call == trainer.calls.end()) return;
    if (answer.refusal && rank == 0) {
      trainer.held.emplace(std::move(call->second), std::move(answer));
    } else {
      if (answer.refusal) trainer.refused.insert(rank);
      answers_.emplace_back(std::move(call->second), std::move(answer));
    }
    trainer.calls.erase(call);
  }

  /// Returns when to look again.
  Deadline release_refusal(Trainer& trainer, Executor& executor) TORCHSPAN_REQUIRES(mutex_) {
    if (!trainer.held) return Deadline::never();
    if (trainer.held_until.is_never()) trainer.held_until = executor.deadline_in(kRefusalLimit);
    if (!trainer.refused.empty() && !trainer.held_until.passed(executor.now())) return trainer.held_until;
    answers_.push_back(*std::exchange(trainer.held, std::nullopt));
    trainer.held_until = Deadline::never();
    trainer.refused.clear();
    return Deadline::never();
  }

  /// Completes the calls that the tables have answered, and arranges the next tick.
  void settle(rpc::WorkerBackend& backend) {
    std::vector<Answer> answers;
    Deadline tick_at;
    {
      MutexLock lock(mutex_);
      Deadline next;
      for (auto& [name, trainer] : trainers_) {
        next = earlier(next, trainer.table->next_deadline());
        next = earlier(next, release_refusal(trainer, backend.runtime().executor));
      }
      answers.swap(answers_);
      if (next < tick_at_) tick_at = tick_at_ = next;
    }
    for (auto& [call, value] : answers) call->set_value(std::move(value));
    if (tick_at.is_never()) return;
    backend.after(tick_at.left(backend.runtime().executor.now()), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->tick();
    });
  }

  void tick() {
    const auto backend = backend_.lock();
    if (!backend) return;
    {
      MutexLock lock(mutex_);
      tick_at_ = Deadline::never();
      for (auto& [name, trainer] : trainers_) trainer.table->tick(backend->runtime().executor.now());
    }
    settle(*backend);
  }

  const std::weak_ptr<rpc::WorkerBackend> backend_;
  mutable Mutex mutex_;
  std::map<std::string, Trainer> trainers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::set<std::string> claimed_ TORCHSPAN_GUARDED_BY(mutex_);  ///< names of trainers of this process
  std::vector<Answer> answers_ TORCHSPAN_GUARDED_BY(mutex_);
  Deadline tick_at_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<int, std::uint64_t> departures_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by rank
};

QuorumExtension::QuorumExtension() = default;
QuorumExtension::~QuorumExtension() = default;

void QuorumExtension::attach(rpc::Registrar& registrar) {
  coordinator_ = std::make_shared<Coordinator>(registrar.worker().backend()->weak_from_this());
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

void QuorumExtension::claim(const std::string& trainer) { coordinator_->claim(trainer); }

std::uint64_t QuorumExtension::departures(int rank) const { return coordinator_->departures(rank); }

bool QuorumExtension::is_over(const std::string& trainer) const {
  return coordinator_->is_over_for(/*rank=*/0, trainer);
}

}  // namespace torchspan::quorum
