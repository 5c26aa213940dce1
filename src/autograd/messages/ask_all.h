#pragma once
#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <utility>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/rpc/worker.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/ask_briefly.h"

namespace torchspan::autograd {

/// The longest time that a question of another worker may take.
constexpr Duration kLongestPatience = std::chrono::minutes(1);

/// Sends `question` to all workers that a context communicated with, and joins their lists with `mine`. Each
/// asks further workers in turn and must answer within question.patience, at most kLongestPatience;
/// `silent(rank, name)` replaces an answer that does not come. Calls `done(list)` once, on the thread that
/// delivers the last answer, under the rules of ask_briefly().
template <rpc::Message M, class Silent, class Done>
void ask_all(const Worker& me, const ContextState& context, const M& question, typename M::Reply mine,
             Silent silent, Done done) {
  using List = typename M::Reply;
  struct Gathering {
    explicit Gathering(Done done) : done(std::move(done)) {}
    Mutex mutex;
    List list TORCHSPAN_GUARDED_BY(mutex);
    std::size_t left TORCHSPAN_GUARDED_BY(mutex) = 1;
    Done done;
    void add(List more) {
      List all;
      {
        MutexLock lock(mutex);
        list.insert(list.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
        if (--left > 0) return;
        all.swap(list);
      }
      done(std::move(all));
    }
  };
  auto gathering = std::make_shared<Gathering>(std::move(done));
  const Duration patience = std::clamp(Duration(question.patience), Duration::zero(), kLongestPatience);
  const Deadline deadline = me.runtime().executor.deadline_in(patience);
  M next = question;
  next.patience = Duration(patience * 2 / 3).count();  // so that the receivers' answers are in time
  for (const std::uint32_t rank : context.workers()) {
    if (rank == me.endpoint()->self().rank || !me.endpoint()->is_present(rank)) continue;
    {
      MutexLock lock(gathering->mutex);
      ++gathering->left;
    }
    ask_briefly(me, rank, next, deadline,
                [gathering, silent, rank, name = me.endpoint()->name_of(rank)](
                    List list, const std::exception_ptr& error) {
                  if (error) list.assign(1, silent(rank, name));
                  gathering->add(std::move(list));
                });
  }
  gathering->add(std::move(mine));
}

}  // namespace torchspan::autograd
