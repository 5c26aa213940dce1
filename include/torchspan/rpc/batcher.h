#pragma once
// Batcher: joins the calls of many callers into batches. Includes no torch/nn.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/rpc/worker.h>

namespace torchspan {

struct BatcherOptions {
  std::size_t max_size = 32;  ///< requests of one batch; at least 1
  /// How long the first request of a batch waits for others; zero: only while another batch is served.
  Duration max_delay = std::chrono::milliseconds(2);
  /// Requests that may wait; at least `max_size`. Beyond it, add() fails with kOverloaded, so that callers get an answer at
  /// once instead of one that comes too late.
  std::size_t max_waiting = 4096;
};

/// Collects the requests of single calls into batches, for example for one forward pass of a model. Handlers return the
/// future of add(), so that no thread waits: PyTorch's async_execution with a batch-updating server. One batch is served at
/// a time, on a thread of the worker; meanwhile, requests collect for the next one. Thread-safe. Requests that wait when it
/// is destroyed, or when the worker stops, fail with kCancelled; the destructor waits for the batch that is being served,
/// unless that destroys it.
template <class Request, class Reply>
class Batcher {
 public:
  /// Returns the replies, in the order of the requests. If it throws, all requests of the batch fail with its exception.
  using Serve = std::function<std::vector<Reply>(std::vector<Request> requests)>;

  Batcher(const Worker& worker, Serve serve, BatcherOptions options = {})
      : state_(std::make_shared<State>(worker, std::move(serve), options)) {
    if (options.max_size == 0)
      throw_invalid("BatcherOptions::max_size is 0: let a batch have at least 1 request");
    if (options.max_waiting < options.max_size)
      throw_invalid("BatcherOptions::max_waiting is less than max_size: no batch could be full");
    if (!state_->serve) throw_invalid("the function that serves the batches of a Batcher is empty");
  }
  ~Batcher() {
    if (!state_) return;
    if (state_->process.is_current()) {
      state_->close();
    } else {
      keep_until_exit(new std::shared_ptr<State>(std::move(state_)));  // a forked child
    }
  }
  Batcher(Batcher&&) noexcept = default;
  Batcher& operator=(Batcher&&) = delete;

  /// Adds a request; the future gets its reply.
  Future<Reply> add(Request request) { return state_->add(state_, std::move(request)); }

 private:
  struct Waiting {
    Request request;
    Promise<Reply> reply;
    TimePoint since;
  };
  struct State {
    State(Worker on, Serve how, BatcherOptions with)
        : worker(std::move(on)), serve(std::move(how)), options(with) {}

    Future<Reply> add(const std::shared_ptr<State>& self, Request request) {
      Promise<Reply> reply = worker.template make_promise<Reply>();
      Future<Reply> future = reply.future();
      bool waits = false, full = false, first = false;
      {
        MutexLock lock(mutex);
        waits = waiting.size() < options.max_waiting;
        if (waits) {
          waiting.push_back({std::move(request), std::move(reply), worker.runtime().executor.now()});
          full = !serving && waiting.size() >= options.max_size;
          if (full) serving = true;
          first = !serving && !std::exchange(timed, true);
        }
      }
      if (full) look_in(self, Duration::zero(), true);
      if (first) look_in(self, options.max_delay, false);
      if (!waits) {
        reply.set_error(
            Error(ErrorKind::kOverloaded, std::to_string(options.max_waiting) +
                                              " requests wait for a batch, as many as "
                                              "BatcherOptions::max_waiting allows: call again later"));
      }
      return future;
    }

    /// Looks for a batch after a delay, on a thread of the worker. `claimed`: `serving` is set for it; else it is the timer.
    void look_in(const std::shared_ptr<State>& self, Duration delay, bool claimed) {
      worker.backend()->after(delay, Look(self, claimed));
    }

    /// What the timer runs, or drops when the worker stops: nothing will serve those that wait then.
    struct Look {
      Look(std::weak_ptr<State> of, bool is_claimed) : state(std::move(of)), claimed(is_claimed) {}
      Look(Look&&) noexcept = default;
      Look& operator=(Look&&) = delete;
      ~Look() {
        if (const auto alive = state.lock()) alive->drop(claimed);
      }
      void operator()() {
        if (const auto alive = std::exchange(state, {}).lock()) alive->look(alive, claimed);
      }
      std::weak_ptr<State> state;  ///< empty once it has run, or was moved
      bool claimed;
    };

    void drop(bool claimed) {
      std::vector<Waiting> dropped;  // their futures fail outside the lock
      MutexLock lock(mutex);
      (claimed ? serving : timed) = false;
      dropped.swap(waiting);
    }

    void look(const std::shared_ptr<State>& self, bool claimed) {
      if (!claimed) {
        MutexLock lock(mutex);
        timed = false;
        if (serving) return;
        serving = true;
      }
      for (;;) {
        std::vector<Waiting> batch;
        Duration left = Duration::zero();
        {
          MutexLock lock(mutex);
          serving = !closed && !waiting.empty();
          if (!serving) return;
          left = waiting.front().since + options.max_delay - worker.runtime().executor.now();
          if (waiting.size() < options.max_size && left > Duration::zero()) {
            serving = false;
            if (std::exchange(timed, true)) return;
          } else {
            const auto end =
                waiting.begin() + static_cast<std::ptrdiff_t>(std::min(waiting.size(), options.max_size));
            batch.assign(std::make_move_iterator(waiting.begin()), std::make_move_iterator(end));
            waiting.erase(waiting.begin(), end);
          }
        }
        if (batch.empty()) return look_in(self, left, false);
        serve_batch(std::move(batch));
      }
    }

    void serve_batch(std::vector<Waiting> batch) {
      {
        MutexLock lock(mutex);
        if (closed) return;  // dropped requests fail with kCancelled
        server = std::this_thread::get_id();
      }
      run(std::move(batch));
      std::optional<Promise<void>> waiter;
      {
        MutexLock lock(mutex);
        server = {};
        waiter = std::exchange(closing, std::nullopt);
      }
      if (waiter) waiter->set_value();
    }

    void run(std::vector<Waiting> batch) {
      try {
        std::vector<Request> requests;
        requests.reserve(batch.size());
        for (Waiting& one : batch) requests.push_back(std::move(one.request));
        std::vector<Reply> replies = serve(std::move(requests));
        if (replies.size() != batch.size()) {
          throw_invalid("the function that serves a Batcher's batches returned " +
                        std::to_string(replies.size()) + " replies for " + std::to_string(batch.size()) +
                        " requests: return one for each");
        }
        for (std::size_t i = 0; i < batch.size(); ++i) batch[i].reply.set_value(std::move(replies[i]));
      } catch (...) {
        for (Waiting& one : batch) one.reply.set_error(std::current_exception());
      }
    }

    void close() {
      std::vector<Waiting> dropped;  // their futures fail outside the lock
      Future<void> served;
      {
        MutexLock lock(mutex);
        closed = true;
        dropped.swap(waiting);
        if (server != ThreadId() && server != std::this_thread::get_id()) {
          closing = worker.template make_promise<void>();
          served = closing->future();
        }
      }
      if (served.valid()) served.wait();
    }

    const OwnerProcess process;
    const Worker worker;
    const Serve serve;
    const BatcherOptions options;
    Mutex mutex;
    std::vector<Waiting> waiting TORCHSPAN_GUARDED_BY(mutex);
    bool serving TORCHSPAN_GUARDED_BY(mutex) = false;
    bool timed TORCHSPAN_GUARDED_BY(mutex) = false;  ///< a timer will look for a batch
    bool closed TORCHSPAN_GUARDED_BY(mutex) = false;
    ThreadId server TORCHSPAN_GUARDED_BY(mutex);                       ///< the thread that serves a batch
    std::optional<Promise<void>> closing TORCHSPAN_GUARDED_BY(mutex);  ///< completed when it has
  };

  std::shared_ptr<State> state_;
};

}  // namespace torchspan
