#pragma once
// Batcher: joins the calls of many callers into batches. Includes no torch/nn.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/rpc/worker.h>

namespace torchspan {

struct BatcherOptions {
  std::size_t max_size = 32;  ///< requests of one batch; at least 1
  /// How long the first request of a batch waits for others; zero: only while another batch is served.
  Duration max_delay = std::chrono::milliseconds(2);
};

/// Collects the requests of single calls into batches, for example for one forward pass of a model. Handlers return the
/// future of add(), so that no thread waits: PyTorch's async_execution with a batch-updating server. One batch is served at
/// a time, on a thread of the worker; meanwhile, requests collect for the next one. Thread-safe. Its destructor fails
/// requests that are not served yet with kCancelled.
template <class Request, class Reply>
class Batcher {
 public:
  /// Returns the replies, in the order of the requests. If it throws, all requests of the batch fail with its exception.
  using Serve = std::function<std::vector<Reply>(std::vector<Request> requests)>;

  Batcher(const Worker& worker, Serve serve, BatcherOptions options = {})
      : state_(std::make_shared<State>(worker, std::move(serve), options)) {
    if (options.max_size == 0)
      throw_invalid("BatcherOptions::max_size is 0: let a batch have at least 1 request");
    if (!state_->serve) throw_invalid("the function that serves the batches of a Batcher is empty");
  }
  ~Batcher() {
    if (state_) state_->close();
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
      bool first = false, full = false;
      {
        MutexLock lock(mutex);
        waiting.push_back({std::move(request), std::move(reply), worker.runtime().executor.now()});
        first = waiting.size() == 1;
        full = waiting.size() >= options.max_size;
        if (serving) return future;
        if (full) serving = true;
      }
      if (full || first) look_in(self, full ? Duration::zero() : options.max_delay, full);
      return future;
    }

    /// Looks for a batch after a delay, on a thread of the worker. `claimed`: `serving` is set for it.
    void look_in(const std::shared_ptr<State>& self, Duration delay, bool claimed) {
      worker.backend()->after(delay, [weak = std::weak_ptr<State>(self), claimed] {
        if (const auto alive = weak.lock()) alive->look(alive, claimed);
      });
    }

    void look(const std::shared_ptr<State>& self, bool claimed) {
      {
        MutexLock lock(mutex);
        if (serving && !claimed) return;
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
          } else {
            const auto end =
                waiting.begin() + static_cast<std::ptrdiff_t>(std::min(waiting.size(), options.max_size));
            batch.assign(std::make_move_iterator(waiting.begin()), std::make_move_iterator(end));
            waiting.erase(waiting.begin(), end);
          }
        }
        if (batch.empty()) return look_in(self, left, false);
        run(std::move(batch));
      }
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
      {
        MutexLock lock(mutex);
        closed = true;
        dropped.swap(waiting);
      }
    }

    const Worker worker;
    const Serve serve;
    const BatcherOptions options;
    Mutex mutex;
    std::vector<Waiting> waiting TORCHSPAN_GUARDED_BY(mutex);
    bool serving TORCHSPAN_GUARDED_BY(mutex) = false;
    bool closed TORCHSPAN_GUARDED_BY(mutex) = false;
  };

  std::shared_ptr<State> state_;
};

}  // namespace torchspan
