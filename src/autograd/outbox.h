#pragma once
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>

#include "autograd/exchange.h"

namespace torchspan::autograd {

/// Sends what one worker's part of a pass says to others. What finds no room, on this worker's connection or
/// in the receiver's queue, is kept and sent again as room comes: when an earlier message was answered, or
/// after a pause. Thread-safe.
class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  explicit Outbox(std::weak_ptr<rpc::Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}

  /// ask_briefly() without a deadline, which liveness and the pass's own watch over; `hear` gets no
  /// kOverloaded.
  template <rpc::Message M, class F>
  void ask(std::uint32_t to, M message, F hear) {
    auto queued = std::make_shared<QueuedMessageOf<M, F>>(to, std::move(message), std::move(hear));
    if (!join_queue(queued)) queued->send(*this);
  }
  /// The pass is over: what waits is dropped.
  void close();
  /// To whom messages wait for room, and why, a line each.
  std::vector<std::string> waiting() const;

 private:
  static constexpr Duration kFirstPause = std::chrono::milliseconds(1);
  static constexpr Duration kLongestPause = std::chrono::milliseconds(100);

  class QueuedMessage {
   public:
    explicit QueuedMessage(std::uint32_t to) : to(to) {}
    virtual ~QueuedMessage() = default;
    virtual void send(Outbox& outbox) = 0;
    const std::uint32_t to;
  };
  using QueuedMessagePtr = std::shared_ptr<QueuedMessage>;

  template <rpc::Message M, class F>
  class QueuedMessageOf final : public QueuedMessage,
                                public std::enable_shared_from_this<QueuedMessageOf<M, F>> {
   public:
    QueuedMessageOf(std::uint32_t to, M message, F hear)
        : QueuedMessage(to), message_(std::move(message)), hear_(std::move(hear)) {}
    void send(Outbox& outbox) override {
      const auto endpoint = outbox.endpoint_.lock();
      if (!endpoint) return;
      ask_briefly(Worker(endpoint), to, message_, Deadline::never(),
                  [self = this->shared_from_this(), weak = outbox.weak_from_this()](
                      typename M::Reply reply, std::exception_ptr error) {
                    const auto outbox = weak.lock();
                    if (outbox && outbox->takes_back(self, error)) return;
                    self->hear_(std::move(reply), std::move(error));
                  });
    }

   private:
    const M message_;
    F hear_;
  };

  /// Of one receiver.
  struct Queue {
    std::deque<QueuedMessagePtr> queue;
    std::size_t refusals = 0;
    std::size_t most = 1;  ///< queue that are sent after the next pause
    Duration pause = kFirstPause;
    bool pausing = false;
    std::string why;
  };

  /// False when nothing waits there.
  bool join_queue(const QueuedMessagePtr& queued);
  /// A queued has come back, or was answered. True when it found no room: then it waits.
  bool takes_back(const QueuedMessagePtr& queued, const std::exception_ptr& error);
  void send_some(std::uint32_t to, std::size_t most);
  void pause_over(std::uint32_t to);
  /// Begins one, unless one is under way.
  void pause(std::uint32_t to, Queue& queue) TORCHSPAN_REQUIRES(mutex_);

  const std::weak_ptr<rpc::Endpoint> endpoint_;
  mutable Mutex mutex_;
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::map<std::uint32_t, Queue> queues_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
