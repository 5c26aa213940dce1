#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/ask_briefly.h"

namespace torchspan::autograd {

/// Sends one message to one worker and repeats it after lost messages, broken connections and full queues,
/// until the receiver answers, the receiver is gone, or this worker stops.
template <rpc::Message M>
class Notification : public std::enable_shared_from_this<Notification<M>> {
 public:
  /// Calls `on_reply` with the answer, if one arrives, under the rules of ask_briefly().
  Notification(const Worker& me, std::uint32_t to, M message,
               std::function<void(const typename M::Reply&)> on_reply = {})
      : me_(me.endpoint()),
        to_(to),
        message_(std::move(message)),
        on_reply_(std::move(on_reply)),
        done_(me.endpoint()->host()) {}

  /// The future completes, never with an error, when there is nothing left to repeat.
  Future<void> start() {
    try_once();
    return done_.future();
  }

 private:
  void try_once() {
    auto endpoint = me_.lock();
    if (!endpoint) return done_.set_value(), void();
    const Worker me(endpoint);
    const Duration limit = std::min<Duration>(kFirstLimit * (1 << std::min(attempt_, 5)), kLongestLimit);
    ask_briefly(
        me, to_, message_, me.runtime().executor.deadline_in(limit),
        [self = this->shared_from_this()](const typename M::Reply& reply, const std::exception_ptr& failed) {
          if (!failed) {
            if (self->on_reply_) self->on_reply_(reply);
            return self->done_.set_value(), void();
          }
          auto endpoint = self->me_.lock();
          const auto host = endpoint ? endpoint->host().lock() : nullptr;
          if (!host) return self->done_.set_value(), void();
          host->post([self, failed] { self->retry_after(failed); });
        });
  }

  void retry_after(const std::exception_ptr& failed) {
    auto endpoint = me_.lock();
    if (!endpoint) return done_.set_value(), void();
    const Error error = to_error(failed);
    const bool passing = error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected ||
                         error.kind() == ErrorKind::kOverloaded;
    if (!passing || !endpoint->is_present(to_)) return done_.set_value(), void();
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
  Promise<void> done_;
  int attempt_ = 0;
};

/// Notifies all workers that a context communicated with. Completes when each has answered or is gone.
template <rpc::Message M>
Future<void> notify_all(const Worker& me, const ContextState& context, const M& message) {
  std::vector<Future<void>> answered;
  for (const std::uint32_t rank : context.workers()) {
    if (rank != me.endpoint()->self().rank)
      answered.push_back(std::make_shared<Notification<M>>(me, rank, message)->start());
  }
  return when_all(std::move(answered));
}

}  // namespace torchspan::autograd
