#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/core/when_all.h>
#include <torchspan/rpc/worker.h>

#include "autograd/exchange.h"
#include "autograd/state.h"

namespace torchspan::autograd {

/// Says one thing to one worker until it is heard: through lost messages, broken connections and full queues,
/// until the worker answers, is gone, or this one stops.
template <rpc::Message M>
class Telling : public std::enable_shared_from_this<Telling<M>> {
 public:
  /// `on_reply` is called with the answer if one comes, briefly, as ask_briefly() says.
  Telling(const Worker& me, std::uint32_t to, M message,
          std::function<void(const typename M::Reply&)> on_reply = {})
      : me_(me.endpoint()),
        to_(to),
        message_(std::move(message)),
        on_reply_(std::move(on_reply)),
        heard_(me.endpoint()->host()) {}

  Future<void> start() {
    try_once();
    return heard_.future();
  }

 private:
  void try_once() {
    auto endpoint = me_.lock();
    if (!endpoint) return heard_.set_value(), void();
    const Worker me(endpoint);
    const Duration limit = std::min<Duration>(kFirstLimit * (1 << std::min(attempt_, 5)), kLongestLimit);
    ask_briefly(
        me, to_, message_, me.runtime().executor.deadline_in(limit),
        [self = this->shared_from_this()](const typename M::Reply& reply, const std::exception_ptr& failed) {
          if (!failed) {
            if (self->on_reply_) self->on_reply_(reply);
            return self->heard_.set_value(), void();
          }
          auto endpoint = self->me_.lock();
          const auto host = endpoint ? endpoint->host().lock() : nullptr;
          if (!host) return self->heard_.set_value(), void();
          host->post([self, failed] { self->hear(failed); });
        });
  }

  void hear(const std::exception_ptr& failed) {
    auto endpoint = me_.lock();
    if (!endpoint) return heard_.set_value(), void();
    const Error error = to_error(failed);
    const bool passing = error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected ||
                         error.kind() == ErrorKind::kOverloaded;
    if (!passing || !endpoint->is_present(to_)) return heard_.set_value(), void();
    if (++attempt_ == kWarnAt) endpoint->runtime().log.warning(error.what());
    const Duration pause = std::min<Duration>(kPause * (1 << std::min(attempt_, 10)), kLongestPause);
    endpoint->after(pause, [self = this->shared_from_this()] { self->try_once(); });
  }

  static constexpr Duration kFirstLimit = std::chrono::seconds(1), kLongestLimit = std::chrono::seconds(30);
  static constexpr Duration kPause = std::chrono::milliseconds(10), kLongestPause = std::chrono::seconds(1);
  static constexpr int kWarnAt = 20;

  const std::weak_ptr<rpc::Endpoint> me_;
  const std::uint32_t to_;
  const M message_;
  const std::function<void(const typename M::Reply&)> on_reply_;
  Promise<void> heard_;
  int attempt_ = 0;
};

/// Tells all workers that a context dealt with; completes when each has heard or is gone.
template <rpc::Message M>
Future<void> tell_all(const Worker& me, const ContextState& context, const M& message) {
  std::vector<Future<void>> heard;
  for (const std::uint32_t rank : context.workers()) {
    if (rank != me.endpoint()->self().rank)
      heard.push_back(std::make_shared<Telling<M>>(me, rank, message)->start());
  }
  return when_all(std::move(heard));
}

/// Joins the lists that a question to all brings: of this worker and of those it asks in turn, who must
/// answer within question.patience. `silent(rank, name)` stands for who does not. `done(list)` is called
/// once, on the thread that brings the last answer: briefly, as ask_briefly() says.
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
  const Duration patience(question.patience);
  const Deadline deadline = me.runtime().executor.deadline_in(patience);
  M next = question;
  next.patience = Duration(patience * 2 / 3).count();  // whoever asks on answers in time
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
