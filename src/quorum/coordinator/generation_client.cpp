#include "quorum/api/generation_client.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/detail/quorum/extension.h>

#include "quorum/coordinator/messages.h"

namespace torchspan::quorum {
namespace {

constexpr Duration kRetryDelay = std::chrono::milliseconds(20);

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
            fmt::format(
                "rank 0 decides which ranks train together, and it is gone ({}): restart the job from "
                "its last checkpoint",
                error.message()))
            .with_worker(worker_.name());
      }
      // Only the connection broke, or a copy of the call replaced it: rank 0 still has the answer.
      if (error.kind() != ErrorKind::kDisconnected && error.kind() != ErrorKind::kCancelled) throw;
    }
    endpoint.runtime().executor.sleep(kRetryDelay);
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
