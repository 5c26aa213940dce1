#include "quorum/api/generation_client.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/detail/quorum/extension.h>
#include <torchspan/detail/wire/codec.h>

#include "quorum/messages.h"

namespace torchspan::quorum {
namespace {

constexpr Duration kRetryDelay = std::chrono::milliseconds(20);
/// How long members wait for each other before they ask whether their generation has ended.
constexpr Duration kFirstPatience = std::chrono::milliseconds(250),
                   kLongestPatience = std::chrono::seconds(4);

template <rpc::Message M>
Future<typename M::Reply> send_to_rank_0(rpc::WorkerBackend& backend, const M& message) {
  const auto completion =
      std::make_shared<rpc::PromiseCompletion<typename M::Reply>>(backend.continuations());
  backend.send(0, rpc::make_request(message), completion);
  return completion->future();
}

}  // namespace

GenerationClient::GenerationClient(const Worker& worker, std::string trainer)
    : worker_(worker), trainer_(std::move(trainer)) {
  static_cast<void>(worker_.extension<QuorumExtension>());
}

Generation GenerationClient::next(const Report& report) {
  rpc::WorkerBackend& backend = *worker_.backend();
  if (!claimed_) worker_.extension<QuorumExtension>().claim(trainer_);
  claimed_ = true;
  await_withdrawal();
  asked_.reset();  // its answer concerns the generation before
  for (;;) {
    try {
      const GenerationAnswer answer = send_to_rank_0(backend, AwaitGeneration{trainer_, report}).wait();
      if (answer.refusal)
        throw Error(*answer.refusal).with_worker(worker_.name()).with_call("ElasticTrainer::run");
      return answer.generation;
    } catch (const Error& error) {
      const bool own = error.call() == "ElasticTrainer::run";
      if (own || backend.is_stopping()) throw;
      if (!backend.is_present(0)) {
        throw Error(
            ErrorKind::kDisconnected,
            fmt::format("rank 0 decides which ranks train together, and this worker has lost it ({}): if its "
                        "process has ended, restart the job from its last checkpoint; if it declared this "
                        "worker dead, restart this worker",
                        error.message()))
            .with_worker(worker_.name());
      }
      // Only the connection broke, or a copy of the call replaced it: rank 0 still has the answer.
      if (error.kind() != ErrorKind::kDisconnected && error.kind() != ErrorKind::kCancelled) throw;
    }
    backend.runtime().executor.sleep(kRetryDelay);
  }
}

/// Each generation uses separate tags, so an abandoned gather matches no later one. Attempts are short: if a member was
/// replaced before this rank arrived, the gather waits for the new process, which never joins this generation.
bool GenerationClient::await_members(const Generation& generation, Duration limit) const {
  if (generation.ranks.size() < 2) return true;
  const rpc::WorkerBackend& backend = *worker_.backend();
  Executor& executor = worker_.runtime().executor;
  const Deadline end = executor.deadline_in(limit);
  Duration patience = kFirstPatience, waited{};
  for (;;) {
    try {
      gather(generation, earlier(end, executor.deadline_in(patience)));
      return true;
    } catch (const Error& error) {
      const bool late = error.kind() == ErrorKind::kTimedOut;
      const bool passing = late || error.kind() == ErrorKind::kDisconnected;
      if (!passing || backend.is_stopping() || !backend.is_present(0) || has_ended(generation)) throw;
      if (is_over(earlier(end, executor.deadline_in(patience)))) return false;
      // A rank that comes late finds the attempts of the others ended, and gives up where they did.
      if (late) waited += patience;
      if (waited >= limit || end.passed(executor.now())) throw;
      if (late) {  // the nth attempt of all members has the same patience
        patience = std::min(2 * patience, kLongestPatience);
      } else {  // the end or the replacement of a process, of which this worker knows in a moment
        executor.sleep(kRetryDelay);
      }
    }
  }
}

/// The nth call for a generation is the nth round of its tag, except those that throw before they wait.
void GenerationClient::gather(const Generation& generation, Deadline until) const {
  rpc::WorkerBackend& backend = *worker_.backend();
  std::vector<std::string> names;
  for (const int rank : generation.ranks) {
    names.push_back(backend.name_of(static_cast<std::uint32_t>(rank)));
    if (backend.is_present(static_cast<std::uint32_t>(rank))) continue;
    throw Error(ErrorKind::kDisconnected,
                fmt::format("worker '{}' (rank {}) of generation {} has died or left", names.back(), rank,
                            generation.number))
        .with_worker(names.back());
  }
  try {
    static_cast<void>(backend.all_gather_bytes(
        fmt::format("elastic.{:016x}.{}", wire::digest(trainer_), generation.number), {}, names, until));
  } catch (const Error& error) {
    // A worker that left or was replaced meanwhile no longer has its name.
    const auto has_name = [&](int rank, const std::string& name) {
      const auto id = static_cast<std::uint32_t>(rank);
      return backend.is_present(id) && backend.name_of(id) == name;
    };
    const bool unchanged =
        std::equal(generation.ranks.begin(), generation.ranks.end(), names.begin(), has_name);
    if (error.kind() != ErrorKind::kInvalid || unchanged) throw;
    throw Error(ErrorKind::kDisconnected, fmt::format("a worker of generation {} left or was replaced: {}",
                                                      generation.number, error.message()));
  }
}

/// Whether this rank should report. Returns false if rank 0 does not answer; the next attempt asks again.
bool GenerationClient::is_over(Deadline until) const {
  if (worker_.rank() == 0) return worker_.extension<QuorumExtension>().is_over(trainer_);
  try {
    return send_to_rank_0(*worker_.backend(), AskAwaited{trainer_}).wait(until);
  } catch (const Error&) {
    return false;
  }
}

void GenerationClient::withdraw(const std::string& why) {
  if (!claimed_)
    return;  // rank 0 would take this rank out of the training of the other trainer with this name
  withdrawn_for_ = why;
  withdrawal_ = send_to_rank_0(*worker_.backend(), Withdraw{trainer_, why});
}

/// Calls are unordered: one that arrives after the next report would erase it.
void GenerationClient::await_withdrawal() {
  rpc::WorkerBackend& backend = *worker_.backend();
  while (withdrawal_) {
    try {
      withdrawal_->wait();
      withdrawal_.reset();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kDisconnected || backend.is_stopping() || !backend.is_present(0)) throw;
      backend.runtime().executor.sleep(kRetryDelay);
      withdraw(withdrawn_for_);
    }
  }
}

bool GenerationClient::is_awaited(const Generation& generation) {
  if (worker_.rank() == 0) return worker_.extension<QuorumExtension>().is_over(trainer_);
  if (generation.ranks.front() != worker_.rank()) return false;
  if (asked_ && !asked_->done()) return false;
  const bool awaited = asked_ && !asked_->error() && asked_->wait();
  asked_ = send_to_rank_0(*worker_.backend(), AskAwaited{trainer_});
  return awaited;
}

bool GenerationClient::has_ended(const Generation& generation) const {
  return std::any_of(generation.ranks.begin(), generation.ranks.end(), [&](int rank) {
    return rank != worker_.rank() && !worker_.backend()->is_present(static_cast<std::uint32_t>(rank));
  });
}

std::uint64_t GenerationClient::departures(const Generation& generation) const {
  const auto& extension = worker_.extension<QuorumExtension>();
  std::uint64_t count = 0;
  for (const int rank : generation.ranks) count += extension.departures(rank);
  return count;
}

}  // namespace torchspan::quorum
