#pragma once
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>

#include "autograd/messages/ask_briefly.h"

namespace torchspan::autograd {

/// Sends the requests of one worker's part of a pass. A request that is refused because this worker's
/// connection or the receiver's queue is full is queued and resent when an earlier request is answered, or
/// after a pause. Thread-safe.
class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  explicit Outbox(std::weak_ptr<rpc::Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}

  /// ask_briefly() without a deadline: the failure detection and the pass's timeout limit the wait. `on_reply`
  /// gets no kOverloaded.
  template <rpc::Message M, class F>
  void ask(std::uint32_t to, M message, F on_reply) {
    auto queued = std::make_shared<QueuedMessageOf<M, F>>(to, std::move(message), std::move(on_reply));
    if (!join_queue(queued)) queued->send(*this);
  }
  /// The pass is over: drops what is queued.
  void close();
  /// One line for each worker with queued messages, with the reason.
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
    QueuedMessageOf(std::uint32_t to, M message, F on_reply)
        : QueuedMessage(to), message_(std::move(message)), on_reply_(std::move(on_reply)) {}
    void send(Outbox& outbox) override {
      const auto endpoint = outbox.endpoint_.lock();
      if (!endpoint) return;
      const device::SideStreamsScope of_gradients(streams_);
      ask_briefly(Worker(endpoint), to, message_, Deadline::never(),
                  [self = this->shared_from_this(), weak = outbox.weak_from_this()](
                      typename M::Reply reply, std::exception_ptr error) {
                    const auto outbox = weak.lock();
                    if (outbox && outbox->takes_back(self, error)) return;
                    self->on_reply_(std::move(reply), std::move(error));
                  });
    }

   private:
    const M message_;
    F on_reply_;
    const device::Streams streams_ = device::Streams::current_side();  ///< under which its tensors were made
  };

  /// The queued messages for one receiver.
  struct Queue {
    std::deque<QueuedMessagePtr> queue;
    std::size_t refusals = 0;
    std::size_t most = 1;  ///< messages that are sent after the next pause
    Duration pause = kFirstPause;
    bool pausing = false;
    std::string why;
  };

  /// Adds a message to the receiver's queue unless that is empty. False if it must be sent now.
  bool join_queue(const QueuedMessagePtr& queued);
  /// A message was answered or refused. Returns true if it was refused because a queue was full: it is queued
  /// again.
  bool takes_back(const QueuedMessagePtr& queued, const std::exception_ptr& error);
  void send_some(std::uint32_t to, std::size_t most);
  void pause_over(std::uint32_t to);
  /// Begins a pause unless one is running.
  void pause(std::uint32_t to, Queue& queue) TORCHSPAN_REQUIRES(mutex_);

  const std::weak_ptr<rpc::Endpoint> endpoint_;
  mutable Mutex mutex_;
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::map<std::uint32_t, Queue> queues_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
