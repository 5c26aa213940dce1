#include "quorum/api/generation_client.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/detail/quorum/extension.h>

#include "quorum/coordinator/messages.h"

namespace torchspan::quorum {
namespace {

constexpr Duration kRetryDelay = std::chrono::milliseconds(20);
/// How long members wait for each other before they ask whether their generation has ended.
constexpr Duration kFirstPatience = std::chrono::milliseconds(250),
                   kLongestPatience = std::chrono::seconds(4);
constexpr Duration kAnswerLimit = std::chrono::seconds(5);

/// The characters of a trainer's name that a gather's tag may have.
std::string tag_of(const std::string& trainer) {
  constexpr std::size_t kMost = 64;
  std::string tag = trainer.substr(0, kMost);
  const auto is_allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  std::replace_if(
      tag.begin(), tag.end(), [&](char c) { return !is_allowed(c); }, '-');
  return tag;
}

template <rpc::Message M>
Future<typename M::Reply> send_to_rank_0(rpc::Endpoint& endpoint, const M& message) {
  const auto completion = std::make_shared<rpc::PromiseCompletion<typename M::Reply>>(endpoint.host());
  endpoint.send(0, rpc::make_request(message), completion);
  return completion->future();
}

}  // namespace

GenerationClient::GenerationClient(const Worker& worker, std::string trainer)
    : worker_(worker), trainer_(std::move(trainer)) {
  static_cast<void>(worker_.extension<QuorumExtension>());
}

Generation GenerationClient::next(const Report& report) {
  rpc::Endpoint& endpoint = *worker_.endpoint();
  await_withdrawal();
  for (;;) {
    try {
      const GenerationAnswer answer = send_to_rank_0(endpoint, AwaitGeneration{trainer_, report}).wait();
      if (answer.refusal)
        throw Error(*answer.refusal).with_worker(worker_.name()).with_call("ElasticTrainer::run");
      return answer.generation;
    } catch (const Error& error) {
      const bool own = error.call() == "ElasticTrainer::run";
      if (own || endpoint.is_stopping()) throw;
      if (!endpoint.is_present(0)) {
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
    endpoint.runtime().executor.sleep(kRetryDelay);
  }
}

/// A generation has gathers of its own, so that one which a rank leaves early matches no later one. Each is short: a
/// member that was replaced before this rank came cannot end it, because it is a gather with the new process, which
/// waits for the next generation.
bool GenerationClient::meet(const Generation& generation, Duration limit) const {
  if (generation.ranks.size() < 2) return true;
  Executor& executor = worker_.runtime().executor;
  const Deadline end = executor.deadline_in(limit);
  Duration patience = kFirstPatience, waited{};
  for (int attempt = 0;; ++attempt) {
    try {
      gather(generation, attempt, earlier(end, executor.deadline_in(patience)));
      return true;
    } catch (const Error& error) {
      const bool passing = error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected;
      if (!passing || worker_.endpoint()->is_stopping() || has_ended(generation)) throw;
      if (is_over()) return false;
      // A rank that comes late finds the attempts of the others ended, and gives up where they did.
      if (error.kind() == ErrorKind::kTimedOut) waited += patience;
      if (waited >= limit || end.passed(executor.now())) throw;
      // The end or the replacement of a process, of which this worker knows in a moment.
      if (error.kind() == ErrorKind::kDisconnected) executor.sleep(kRetryDelay);
    }
    patience = std::min(2 * patience, kLongestPatience);
  }
}

void GenerationClient::gather(const Generation& generation, int attempt, Deadline until) const {
  rpc::Endpoint& endpoint = *worker_.endpoint();
  std::vector<std::string> names;
  for (const int rank : generation.ranks) {
    names.push_back(endpoint.name_of(static_cast<std::uint32_t>(rank)));
    if (endpoint.is_present(static_cast<std::uint32_t>(rank))) continue;
    throw Error(ErrorKind::kDisconnected,
                fmt::format("worker '{}' (rank {}) of generation {} has died or left", names.back(), rank,
                            generation.number))
        .with_worker(names.back());
  }
  static_cast<void>(endpoint.all_gather_bytes(
      fmt::format("elastic.{}.{}.{}", tag_of(trainer_), generation.number, attempt), {}, names, until));
}

/// Whether a rank waits for the next generation, which it does only if it left the current one or was not in it.
bool GenerationClient::is_over() const {
  if (worker_.rank() == 0) return worker_.extension<QuorumExtension>().is_awaited(trainer_);
  try {
    return send_to_rank_0(*worker_.endpoint(), AskAwaited{trainer_}).wait(kAnswerLimit);
  } catch (const Error&) {  // the next attempt asks again
    return false;
  }
}

void GenerationClient::withdraw(const std::string& why) {
  withdrawn_for_ = why;
  withdrawal_ = send_to_rank_0(*worker_.endpoint(), Withdraw{trainer_, why});
}

/// Calls are unordered: one that arrives after the next report would erase it.
void GenerationClient::await_withdrawal() {
  rpc::Endpoint& endpoint = *worker_.endpoint();
  while (withdrawal_) {
    try {
      withdrawal_->wait();
      withdrawal_.reset();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kDisconnected || endpoint.is_stopping() || !endpoint.is_present(0))
        throw;
      endpoint.runtime().executor.sleep(kRetryDelay);
      withdraw(withdrawn_for_);
    }
  }
}

bool GenerationClient::is_awaited(const Generation& generation) {
  if (worker_.rank() == 0) return worker_.extension<QuorumExtension>().is_awaited(trainer_);
  if (generation.ranks.front() != worker_.rank()) return false;
  if (asked_ && !asked_->done()) return false;
  const bool awaited = asked_ && !asked_->error() && asked_->wait();
  asked_ = send_to_rank_0(*worker_.endpoint(), AskAwaited{trainer_});
  return awaited;
}

bool GenerationClient::has_ended(const Generation& generation) const {
  return std::any_of(generation.ranks.begin(), generation.ranks.end(), [&](int rank) {
    return rank != worker_.rank() && !worker_.endpoint()->is_present(static_cast<std::uint32_t>(rank));
  });
}

std::uint64_t GenerationClient::departures(const Generation& generation) const {
  const auto& extension = worker_.extension<QuorumExtension>();
  std::uint64_t count = 0;
  for (const int rank : generation.ranks) count += extension.departures(rank);
  return count;
}

}  // namespace torchspan::quorum
