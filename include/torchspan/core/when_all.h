#pragma once
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/core/future.h>

namespace torchspan {
namespace future_detail {

template <class T>
using All = std::conditional_t<std::is_void_v<T>, void, std::vector<Stored<T>>>;

/// Collects results; completes with the last value or the first failure.
template <class T>
class Collector {
 public:
  Collector(std::weak_ptr<FutureHost> host, std::vector<Future<T>> futures)
      : promise_(std::move(host)), futures_(std::move(futures)), left_(futures_.size()) {}

  Future<All<T>> future() const { return promise_.future(); }
  void note(const Future<T>& done) {
    if (done.error()) promise_.set_error(done.error());
    if (left_.fetch_sub(1) == 1) deliver();
  }

 private:
  void deliver() {
    promise_.set_from([&]() -> All<T> {
      if constexpr (std::is_void_v<T>) {
        for (const auto& future : futures_) future.wait();
      } else {
        std::vector<T> values;
        values.reserve(futures_.size());
        for (const auto& future : futures_) values.push_back(future.wait());
        return values;
      }
    });
  }

  Promise<All<T>> promise_;
  const std::vector<Future<T>> futures_;
  std::atomic<std::size_t> left_;
};

}  // namespace future_detail

/// Completes with the values of all `futures`, in order (Future<void>: no value), when the last one is
/// ready, or with the first failure at once, while others still run. Awaitable. Completes at once for no
/// futures.
template <class T>
Future<future_detail::All<T>> when_all(std::vector<Future<T>> futures) {
  if (futures.empty()) return make_ready_future<future_detail::All<T>>();
  std::weak_ptr<FutureHost> host;
  for (const Future<T>& future : futures) {
    if (host.expired()) host = future.host();  // futures that were created ready have no host
  }
  auto collector = std::make_shared<future_detail::Collector<T>>(host, futures);
  for (const Future<T>& future : futures) {
    future.add_done_callback([collector](Future<T> done) { collector->note(done); });
  }
  return collector->future();
}

/// Waits for all futures and returns their values. Throws the first failure at once, or Error{kTimedOut} at
/// the deadline; the others continue.
template <class T>
future_detail::All<T> wait_all(std::vector<Future<T>> futures, Deadline deadline = Deadline::never()) {
  return when_all(std::move(futures)).wait(deadline);
}

}  // namespace torchspan
