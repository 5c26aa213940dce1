// Clears the accumulated gradients of a context: the caller asks one worker after another, and each answers
// with the workers that it communicated with. Before that, each waits until the workers that it notified of a
// failed pass have answered: one that does not know of the failure could begin that pass after it was cleared.
#include "autograd/contexts/clear_gradients.h"

#include <fmt/format.h>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/rpc/endpoint.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "core/api/saturated_time.h"

namespace torchspan::autograd {
namespace {

ClearedPart clear(ContextState& context) {
  ClearedPart part;
  part.running = !context.clear_gradients();
  for (const std::uint32_t rank : context.workers()) part.peers.push_back(rank);
  return part;
}

/// Clears when no worker can begin a pass any more that has failed here.
Future<ClearedPart> clear_when_notified(const std::shared_ptr<ContextState>& context) {
  return context->failures_notified().then([context](const Future<void>&) { return clear(*context); });
}

void check(const ClearedPart& part, const std::string& worker) {
  if (!part.running) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("clear_gradients(): a backward pass of this context still runs on worker '{}'; "
                          "wait for it, then clear again",
                          worker));
}

/// Skips a worker that is gone.
void ask(std::map<std::uint32_t, Future<ClearedPart>>& asked, const Worker& me, std::uint32_t rank,
         std::uint64_t context, Deadline deadline) {
  try {
    asked.emplace(rank, me.request(Destination(rank), ClearGradients{context}, deadline));
  } catch (const Error&) {
    if (me.endpoint()->is_present(rank)) throw;
  }
}

/// The answer of `rank`; nullopt if that worker is gone, with its gradients.
std::optional<ClearedPart> answer_of(const Worker& me, std::uint32_t rank,
                                     const Future<ClearedPart>& answer) {
  try {
    return answer.wait();
  } catch (const Error& error) {
    if (!me.endpoint()->is_present(rank)) return std::nullopt;
    throw Error(error.kind(),
                fmt::format("clear_gradients(): worker '{}' may still have gradients of this context, clear "
                            "again: {}",
                            me.endpoint()->name_of(rank), error.message()))
        .with_worker(me.endpoint()->name_of(rank));
  }
}

}  // namespace

void serve_clear_gradients(rpc::Registrar& registrar, const std::shared_ptr<Registry>& registry) {
  registrar.handle<ClearGradients>(
      rpc::RunOn::kPool, [registry](const rpc::CallInfo&, const ClearGradients& message) {
        const auto context = registry->find(message.context);
        return context ? clear_when_notified(context) : make_ready_future<ClearedPart>();
      });
}

void ContextView::clear_gradients(Duration timeout) const {
  worker_.endpoint()->check_running();
  const Deadline deadline = worker_.runtime().executor.deadline_in(no_limit_if_zero(timeout));
  const Future<void> notified = state_->failures_notified();
  // What completes it runs on the pool, of which this thread may be the only one.
  std::optional<Pool::ExtraThread> extra;
  if (!notified.done()) extra.emplace(worker_.endpoint()->pool());
  if (!notified.wait_until(deadline)) {
    throw Error(
        ErrorKind::kTimedOut,
        "clear_gradients(): a worker has not confirmed that the failed backward pass of this context has "
        "ended there; wait until it answers or is declared dead, then clear again");
  }
  extra.reset();
  const ClearedPart mine = clear(*state_);
  check(mine, worker_.name());
  std::set<std::uint32_t> known(mine.peers.begin(), mine.peers.end());
  known.insert(worker_.rank());
  std::vector<std::uint32_t> next(mine.peers.begin(), mine.peers.end());
  while (!next.empty()) {
    std::map<std::uint32_t, Future<ClearedPart>> asked;
    for (const std::uint32_t rank : std::exchange(next, {})) {
      if (rank != worker_.endpoint()->self().rank) ask(asked, worker_, rank, id(), deadline);
    }
    for (const auto& [rank, answer] : asked) {
      const std::optional<ClearedPart> part = answer_of(worker_, rank, answer);
      if (!part) continue;
      check(*part, worker_.endpoint()->name_of(rank));
      for (const std::uint32_t peer : part->peers) {
        if (known.insert(peer).second) next.push_back(peer);
      }
    }
  }
}

}  // namespace torchspan::autograd
