#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/core/when_all.h>
#include <torchspan/rpc/worker.h>

#include "autograd/exchange.h"
#include "autograd/state.h"

namespace torchspan::autograd {

/// Says one thing to one worker until it is heard: through lost messages and broken connections, until the
/// worker answers, is gone, or this one stops.
template <rpc::Message M>
class Telling : public std::enable_shared_from_this<Telling<M>> {
 public:
  Telling(const Worker& me, std::uint32_t to, M message)
      : me_(me.endpoint()), to_(to), message_(std::move(message)), heard_(me.endpoint()->host()) {}

  Future<void> start() {
    try_once();
    return heard_.future();
  }

 private:
  static constexpr int kAttempts = 20;

  void try_once() {
    auto endpoint = me_.lock();
    if (!endpoint) return heard_.set_value(), void();
    const Worker me(endpoint);
    const Duration limit = std::min<Duration>(kFirstLimit * (1 << std::min(attempt_, 5)), kLongestLimit);
    ask_briefly(
        me, to_, message_, me.runtime().executor.deadline_in(limit),
        [self = this->shared_from_this()](const typename M::Reply&, const std::exception_ptr& failed) {
          if (!failed) return self->heard_.set_value(), void();
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
    if (!passing || !endpoint->is_present(to_) || ++attempt_ == kAttempts) {
      if (passing && attempt_ == kAttempts) endpoint->runtime().log.warning(error.what());
      return heard_.set_value(), void();
    }
    endpoint->after(kPause, [self = this->shared_from_this()] { self->try_once(); });
  }

  static constexpr Duration kFirstLimit = std::chrono::seconds(1), kLongestLimit = std::chrono::seconds(30);
  static constexpr Duration kPause = std::chrono::milliseconds(20);

  const std::weak_ptr<rpc::Endpoint> me_;
  const std::uint32_t to_;
  const M message_;
  Promise<void> heard_;
  int attempt_ = 0;
};

/// Tells all workers that a context dealt with; completes when each has heard or is gone.
template <rpc::Message M>
Future<void> tell_all(const Worker& me, const ContextState& context, const M& message) {
  std::vector<Future<void>> heard;
  for (const std::uint32_t rank : context.workers()) {
    if (rank != me.rank()) heard.push_back(std::make_shared<Telling<M>>(me, rank, message)->start());
  }
  return when_all(std::move(heard));
}

/// Joins the lists that a question to all brings: of this worker and of those it asks in turn. Who does not
/// answer within the limit is left out.
template <rpc::Message M>
Future<typename M::Reply> ask_all(const Worker& me, const ContextState& context, const M& question,
                                  typename M::Reply mine) {
  using List = typename M::Reply;
  struct Gathering {
    explicit Gathering(std::weak_ptr<FutureHost> host) : promise(std::move(host)) {}
    Mutex mutex;
    List list TORCHSPAN_GUARDED_BY(mutex);
    std::size_t left TORCHSPAN_GUARDED_BY(mutex) = 1;
    Promise<List> promise;
    void add(List more) {
      List all;
      {
        MutexLock lock(mutex);
        list.insert(list.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
        if (--left > 0) return;
        all.swap(list);
      }
      promise.set_value(std::move(all));
    }
  };
  auto gathering = std::make_shared<Gathering>(me.endpoint()->host());
  const Deadline deadline = me.runtime().executor.deadline_in(std::chrono::seconds(2));
  for (const std::uint32_t rank : context.workers()) {
    if (rank == me.rank()) continue;
    {
      MutexLock lock(gathering->mutex);
      ++gathering->left;
    }
    me.request(Destination(rank), question, deadline).then([gathering](Future<List> done) {
      gathering->add(done.error() ? List() : done.wait());
    });
  }
  Future<List> all = gathering->promise.future();
  gathering->add(std::move(mine));
  return all;
}

}  // namespace torchspan::autograd
