#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>
#include <torchspan/rpc/worker.h>

#include "autograd/contexts/context_state.h"

namespace torchspan::autograd {

/// A weak reference to this worker, for objects that may outlive it.
class WeakWorker {
 public:
  explicit WeakWorker(const Worker& worker)
      : backend_(worker.backend()), continuations_(worker.backend()->continuations()), name_(worker.name()) {}

  const std::string& name() const { return name_; }
  /// Null after the worker was destroyed.
  std::shared_ptr<rpc::WorkerBackend> backend() const { return backend_.lock(); }
  const std::weak_ptr<ContinuationExecutor>& continuations() const { return continuations_; }
  /// Throws Error{kCancelled} after the worker was destroyed.
  Worker require() const;

 private:
  const std::weak_ptr<rpc::WorkerBackend> backend_;
  const std::weak_ptr<ContinuationExecutor> continuations_;
  const std::string name_;
};

/// The answer to a request of type M. Give it once, from any thread that holds no lock. If it is destroyed
/// before that, the request fails on the worker that sent it.
template <rpc::Message M>
class Answer {
 public:
  explicit Answer(std::shared_ptr<rpc::Completion> done) : done_(std::move(done)) {}
  Answer(Answer&&) noexcept = default;
  Answer& operator=(Answer&&) noexcept = default;

  void give(const typename M::Reply& reply) {
    auto payload = wire::to_payload(reply);
    std::exchange(done_, nullptr)->succeed(payload);
  }
  /// Leaves an empty object behind.
  Answer take() { return Answer(std::exchange(done_, nullptr)); }
  /// Whether this object must still give the answer.
  explicit operator bool() const { return done_ != nullptr; }

 private:
  std::shared_ptr<rpc::Completion> done_;
};

/// Locks a reference to a part of the worker. Throws Error{kCancelled} after the worker was destroyed.
template <class T>
std::shared_ptr<T> require_alive(const std::weak_ptr<T>& part) {
  auto alive = part.lock();
  if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
  return alive;
}

/// Serves M with a member function of `part`, which gives the answer at once or keeps it.
template <rpc::Message M, class T>
void serve_answered(rpc::Registrar& registrar, std::weak_ptr<T> part, rpc::RunOn where,
                    void (T::*handler)(std::uint32_t peer, M, Answer<M>)) {
  registrar.handle_raw(M::kType, std::string(M::kName), where,
                       [part = std::move(part), handler](const rpc::CallInfo& call, wire::Payload& payload,
                                                         std::shared_ptr<rpc::Completion> done) {
                         const auto alive = require_alive(part);
                         (alive.get()->*handler)(call.peer, wire::from_payload<M>(payload),
                                                 Answer<M>(std::move(done)));
                       });
}

/// Sends `message` and calls `on_reply(Reply, std::exception_ptr)` once, on the thread that delivers the
/// reply; this saves a change of threads in each step of a pass. That thread also serves other calls, so
/// `on_reply` must take microseconds, wait for nothing, run no user code and not throw; it posts other work.
template <rpc::Message M, class F>
void ask_briefly(const Worker& me, std::uint32_t to, const M& message, Deadline deadline, F on_reply) {
  using Reply = typename M::Reply;
  class Receiver final : public rpc::Completion {
   public:
    explicit Receiver(F on_reply) : on_reply_(std::move(on_reply)) {}
    void succeed(wire::Payload& payload) override {
      Reply reply{};
      try {
        reply = wire::from_payload<Reply>(payload);
      } catch (...) {
        return fail(std::current_exception());
      }
      on_reply_(std::move(reply), nullptr);
    }
    void fail(std::exception_ptr error) override { on_reply_(Reply{}, std::move(error)); }

   private:
    F on_reply_;
  };
  rpc::Request request = rpc::make_request(message);
  request.deadline = deadline;
  me.backend()->send(to, std::move(request), std::make_shared<Receiver>(std::move(on_reply)));
}

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
    if (rank == me.backend()->self().rank || !me.backend()->is_present(rank)) continue;
    {
      MutexLock lock(gathering->mutex);
      ++gathering->left;
    }
    ask_briefly(me, rank, next, deadline,
                [gathering, silent, rank, name = me.backend()->name_of(rank)](
                    List list, const std::exception_ptr& error) {
                  if (error) list.assign(1, silent(rank, name));
                  gathering->add(std::move(list));
                });
  }
  gathering->add(std::move(mine));
}

/// Sends one message to one worker and repeats it after lost messages, broken connections and full queues,
/// until the receiver answers, the receiver is gone, or this worker stops.
template <rpc::Message M>
class Notification : public std::enable_shared_from_this<Notification<M>> {
 public:
  /// Calls `on_reply` with the answer, if one arrives, under the rules of ask_briefly().
  Notification(const Worker& me, std::uint32_t to, M message,
               std::function<void(const typename M::Reply&)> on_reply = {})
      : me_(me.backend()),
        to_(to),
        message_(std::move(message)),
        on_reply_(std::move(on_reply)),
        done_(me.backend()->continuations()) {}

  /// The future completes, never with an error, when there is nothing left to repeat.
  Future<void> start() {
    try_once();
    return done_.future();
  }

 private:
  void try_once() {
    auto backend = me_.lock();
    if (!backend) return done_.set_value(), void();
    const Worker me(backend);
    const Duration limit = std::min<Duration>(kFirstLimit * (1 << std::min(attempt_, 5)), kLongestLimit);
    ask_briefly(
        me, to_, message_, me.runtime().executor.deadline_in(limit),
        [self = this->shared_from_this()](const typename M::Reply& reply, const std::exception_ptr& failed) {
          if (!failed) {
            if (self->on_reply_) self->on_reply_(reply);
            return self->done_.set_value(), void();
          }
          auto backend = self->me_.lock();
          const auto continuations = backend ? backend->continuations().lock() : nullptr;
          if (!continuations) return self->done_.set_value(), void();
          continuations->post([self, failed] { self->retry_after(failed); });
        });
  }

  void retry_after(const std::exception_ptr& failed) {
    auto backend = me_.lock();
    if (!backend) return done_.set_value(), void();
    const Error error = to_error(failed);
    const bool passing = error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected ||
                         error.kind() == ErrorKind::kOverloaded;
    if (!passing || !backend->is_present(to_)) return done_.set_value(), void();
    if (++attempt_ == kWarnAt) backend->runtime().log.warning(error.what());
    const Duration pause = std::min<Duration>(kPause * (1 << std::min(attempt_, 10)), kLongestPause);
    backend->after(pause, [self = this->shared_from_this()] { self->try_once(); });
  }

  static constexpr Duration kFirstLimit = std::chrono::seconds(1), kLongestLimit = std::chrono::seconds(30);
  static constexpr Duration kPause = std::chrono::milliseconds(10), kLongestPause = std::chrono::seconds(1);
  static constexpr int kWarnAt = 20;

  const std::weak_ptr<rpc::WorkerBackend> me_;
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
    if (rank != me.backend()->self().rank)
      answered.push_back(std::make_shared<Notification<M>>(me, rank, message)->start());
  }
  return when_all(std::move(answered));
}

/// Sends the requests of one worker's part of a pass. A request that is refused because this worker's
/// connection or the receiver's queue is full is queued and resent when an earlier request is answered, or
/// after a pause. Thread-safe.
class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  explicit Outbox(std::weak_ptr<rpc::WorkerBackend> backend) : backend_(std::move(backend)) {}

  /// ask_briefly() without a deadline: the failure detection and the pass's timeout limit the wait. `on_reply`
  /// gets no kOverloaded.
  template <rpc::Message M, class F>
  void ask(std::uint32_t to, M message, F on_reply) {
    auto queued = std::make_shared<QueuedMessage>(to);
    // The streams under which its tensors were made are current when it is sent.
    queued->send = [message = std::move(message), on_reply = std::move(on_reply),
                    streams = device::Streams::current_side()](const QueuedMessagePtr& self,
                                                               Outbox& outbox) mutable {
      const auto backend = outbox.backend_.lock();
      if (!backend) return;
      const device::SideStreamsScope of_gradients(streams);
      ask_briefly(Worker(backend), self->to, message, Deadline::never(),
                  [self, &on_reply, weak = outbox.weak_from_this()](typename M::Reply reply,
                                                                    std::exception_ptr error) {
                    const auto outbox = weak.lock();
                    if (outbox && outbox->takes_back(self, error)) return;
                    on_reply(std::move(reply), std::move(error));  // `self` has it
                  });
    };
    if (!join_queue(queued)) queued->send(queued, *this);
  }
  /// The pass is over: drops what is queued.
  void close();
  /// One line for each worker with queued messages, with the reason.
  std::vector<std::string> waiting() const;

 private:
  static constexpr Duration kFirstPause = std::chrono::milliseconds(1);
  static constexpr Duration kLongestPause = std::chrono::milliseconds(100);

  struct QueuedMessage;
  using QueuedMessagePtr = std::shared_ptr<QueuedMessage>;
  struct QueuedMessage {
    explicit QueuedMessage(std::uint32_t to) : to(to) {}
    const std::uint32_t to;
    UniqueFunction<void(const QueuedMessagePtr& self, Outbox&)> send;
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

  const std::weak_ptr<rpc::WorkerBackend> backend_;
  mutable Mutex mutex_;
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::map<std::uint32_t, Queue> queues_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
