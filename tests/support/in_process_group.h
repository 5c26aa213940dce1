#pragma once
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/collective.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/step_part.h"
#include "tests/support/reduce_step.h"

/// Groups whose ranks are threads of one process: reduces in rank order, on any Executor, so that tests of
/// code over groups also run on the simulated one. Ranks may die, be late, or disagree.
namespace torchspan::testing {

struct InProcessOptions {
  Duration timeout{};  ///< zero: no rank is ever late
};

namespace in_process {

/// One rank's contribution to one operation, and its result.
struct Arrival {
  std::string call;  ///< equal on all ranks, or the operation fails
  /// For a sparse tensor with entries: equal on all ranks that have any.
  std::optional<std::int64_t> sparse_dim;
  std::vector<at::Tensor> tensors;
  Bytes bytes;
  std::vector<at::Tensor> results;
  std::vector<Bytes> gathered;
  Runtime* runtime = nullptr;  ///< of the rank that splits the group
  std::shared_ptr<void> extra;
  std::function<void()> succeed;
  std::function<void(std::exception_ptr)> fail;
};
using Arrivals = std::vector<std::shared_ptr<Arrival>>;
using Work = std::function<void(Arrivals&)>;

/// The operations of one group, in order.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<Pool> pool, std::vector<int> ranks, InProcessOptions options)
      : pool_(std::move(pool)), ranks_(std::move(ranks)), options_(options), next_(ranks_.size()) {}

  const std::vector<int>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::shared_ptr<Pool>& pool() const { return pool_; }
  const InProcessOptions& options() const { return options_; }

  void arrive(int rank, const std::shared_ptr<Arrival>& arrival, Work work) {
    std::exception_ptr broken;
    {
      MutexLock lock(mutex_);
      broken = broken_;
      if (!broken) {
        const std::uint64_t number = next_[rank]++;
        Slot& slot = slots_[number];
        slot.arrivals.resize(ranks_.size());
        slot.arrivals[rank] = arrival;
        if (slot.count++ == 0 && options_.timeout > Duration::zero()) {
          slot.deadline = pool_->executor().deadline_in(options_.timeout);
        }
        if (slot.count == ranks_.size()) {
          full_.emplace_back(std::move(slot.arrivals), std::move(work));
          slots_.erase(number);
          if (!std::exchange(draining_, true)) {
            pool_->post([self = shared_from_this()] { self->drain(); });
          }
        }
      }
    }
    if (broken) arrival->fail(broken);
  }

  std::optional<Error> failure() const {
    MutexLock lock(mutex_);
    return broken_ ? std::optional<Error>(to_error(broken_)) : std::nullopt;
  }

  /// Fails all pending and later operations, once.
  void fail(const Error& error) {
    std::vector<std::shared_ptr<Arrival>> pending;
    const auto cause = std::make_exception_ptr(error);
    {
      MutexLock lock(mutex_);
      if (broken_) return;
      broken_ = cause;
      for (auto& [number, slot] : slots_) {
        for (auto& arrival : slot.arrivals) {
          if (arrival) pending.push_back(std::move(arrival));
        }
      }
      slots_.clear();
    }
    for (const auto& arrival : pending) arrival->fail(cause);
  }

  /// Fails the group if a rank is late; returns the time of the next check.
  Deadline look_for_late_ones(TimePoint now) {
    std::string late;
    Deadline next;
    {
      MutexLock lock(mutex_);
      for (auto& [number, slot] : slots_) {
        next = earlier(next, slot.deadline);
        if (!slot.deadline.passed(now)) continue;
        std::string call;
        for (const auto& arrival : slot.arrivals) {
          if (arrival) call = arrival->call;
        }
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
          if (!slot.arrivals[rank]) late += " rank " + std::to_string(ranks_[rank]);
        }
        late += " did not reach operation " + std::to_string(number) + " (" + call + ") in time";
        break;
      }
    }
    if (late.empty()) return next;
    fail(Error(ErrorKind::kTimedOut, late.substr(1)));
    return Deadline::never();
  }

  std::vector<std::uint64_t> operations() const {
    MutexLock lock(mutex_);
    return next_;
  }

 private:
  struct Slot {
    Arrivals arrivals;
    std::size_t count = 0;
    Deadline deadline;
  };

  /// How two ranks' calls differ; empty if they do not.
  std::string difference(const Arrivals& all) const {
    const auto call_text = [&](std::size_t rank) {
      const auto& sparse_dim = all[rank]->sparse_dim;
      return "rank " + std::to_string(ranks_[rank]) + " called " + all[rank]->call +
             (sparse_dim ? " with " + std::to_string(*sparse_dim) + " sparse dimensions" : "");
    };
    std::size_t with_entries = 0;
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (!all[with_entries]->sparse_dim) with_entries = rank;
      if (all[rank]->call != all[0]->call) return call_text(0) + ", " + call_text(rank);
      const auto& sparse_dim = all[rank]->sparse_dim;
      if (sparse_dim && sparse_dim != all[with_entries]->sparse_dim)
        return call_text(with_entries) + ", " + call_text(rank);
    }
    return "";
  }

  void drain() {
    for (;;) {
      std::pair<Arrivals, Work> job;
      {
        MutexLock lock(mutex_);
        if (full_.empty()) {
          draining_ = false;
          return;
        }
        job = std::move(full_.front());
        full_.pop_front();
      }
      Arrivals& all = job.first;
      if (const std::string text = difference(all); !text.empty()) {
        const Error error(ErrorKind::kInvalid, text);
        fail(error);
        for (const auto& arrival : all) arrival->fail(std::make_exception_ptr(error));
        continue;
      }
      const at::NoGradGuard no_grad;
      job.second(all);
      for (const auto& arrival : all) arrival->succeed();
    }
  }

  const std::shared_ptr<Pool> pool_;
  const std::vector<int> ranks_;
  const InProcessOptions options_;
  mutable Mutex mutex_;
  std::vector<std::uint64_t> next_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Slot> slots_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::pair<Arrivals, Work>> full_ TORCHSPAN_GUARDED_BY(mutex_);
  bool draining_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::exception_ptr broken_ TORCHSPAN_GUARDED_BY(mutex_);
};

inline at::Tensor reduced(const Arrivals& all, collective::ReduceOp reduction) {
  const at::ScalarType dtype = all[0]->tensors[0].scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = [&](const at::Tensor& tensor) { return narrow ? tensor.to(at::kFloat) : tensor; };
  at::Tensor result = wide(all[0]->tensors[0]).clone();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    result = reduce_step(result, wide(all[rank]->tensors[0]), reduction);
  }
  if (reduction == collective::kAvg) result = at::div(result, static_cast<double>(all.size()));
  if (narrow) result = result.to(dtype);
  return result.is_sparse() ? result.coalesce() : result;
}

class Backend final : public collective::Backend {
 public:
  Backend(std::shared_ptr<Exchange> exchange, int rank, Runtime& runtime,
          std::function<void(const std::shared_ptr<Exchange>&)> made)
      : exchange_(std::move(exchange)), rank_(rank), runtime_(runtime), made_(std::move(made)) {}

  std::string name() const override { return "in-process"; }
  int rank() const override { return rank_; }
  const std::vector<int>& ranks() const override { return exchange_->ranks(); }
  Runtime& runtime() const override { return runtime_; }

  std::shared_ptr<collective::Backend> split(int color, int key) override {
    const auto arrival = std::make_shared<Arrival>();
    ByteWriter place;
    place.put(color);
    place.put(key);
    arrival->bytes = place.take();
    arrival->runtime = &runtime_;
    auto future = submit(arrival, "split", [this](Arrivals& all) { split_all(all); });
    future.wait();
    auto made = std::static_pointer_cast<Backend>(arrival->extra);
    made_(made->exchange_);
    return made;
  }
  Future<at::Tensor> all_reduce(at::Tensor tensor, collective::ReduceOp reduction) override {
    const auto arrival = std::make_shared<Arrival>();
    arrival->tensors = {tensor};
    if (tensor.is_sparse() && tensor._nnz() > 0) arrival->sparse_dim = tensor.sparse_dim();
    const std::string call = "all_reduce " + to_string(reduction) + " of " + described(tensor);
    return first(arrival, submit(arrival, call, [reduction](Arrivals& all) {
                   const at::Tensor result = reduced(all, reduction);
                   for (const auto& one : all) {
                     if (!result.is_sparse()) one->tensors[0].copy_(result);
                     one->results = {result.is_sparse() ? result.clone() : one->tensors[0]};
                   }
                 }));
  }
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, collective::ReduceOp reduction) override {
    const auto arrival = std::make_shared<Arrival>();
    arrival->tensors = {tensor};
    return first(arrival,
                 submit(arrival, "reduce_scatter " + to_string(reduction) + " of " + described(tensor),
                        [reduction](Arrivals& all) {
                          const auto parts =
                              reduced(all, reduction).chunk(static_cast<std::int64_t>(all.size()));
                          for (std::size_t rank = 0; rank < all.size(); ++rank)
                            all[rank]->results = {parts[rank].clone()};
                        }));
  }
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override {
    const auto arrival = std::make_shared<Arrival>();
    arrival->tensors = {tensor};
    return submit(arrival, "all_gather of " + described(tensor, /*first_free=*/true), [](Arrivals& all) {
      for (const auto& one : all) {
        for (const auto& other : all) one->results.push_back(other->tensors[0].clone());
      }
    });
  }
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override {
    const auto arrival = std::make_shared<Arrival>();
    arrival->tensors = {tensor};
    return first(arrival,
                 submit(arrival, "broadcast from " + std::to_string(root) + " of " + described(tensor),
                        [root](Arrivals& all) {
                          for (const auto& one : all) {
                            if (one != all[root]) one->tensors[0].copy_(all[root]->tensors[0]);
                            one->results = {one->tensors[0]};
                          }
                        }));
  }
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override {
    const auto arrival = std::make_shared<Arrival>();
    arrival->tensors = std::move(parts);
    const std::string call = std::string("all_to_all of ") + c10::toString(arrival->tensors[0].scalar_type());
    return submit(arrival, call, [](Arrivals& all) {
      for (std::size_t rank = 0; rank < all.size(); ++rank) {
        for (const auto& other : all) all[rank]->results.push_back(other->tensors[rank].clone());
      }
    });
  }
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override {
    const auto arrival = std::make_shared<Arrival>();
    arrival->bytes.assign(mine.begin(), mine.end());
    wait(submit(arrival, "exchange",
                [](Arrivals& all) {
                  for (const auto& one : all) {
                    for (const auto& other : all) one->gathered.push_back(other->bytes);
                  }
                }),
         timeout);
    return arrival->gathered;
  }
  void barrier(Duration timeout) override {
    wait(submit(std::make_shared<Arrival>(), "barrier", [](Arrivals&) {}), timeout);
  }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::empty(sizes, dtype);
  }
  void abort(const Error& cause) override { exchange_->fail(cause); }
  std::optional<Error> failure() override { return exchange_->failure(); }

 private:
  static void wait(const Future<std::vector<at::Tensor>>& future, Duration timeout) {
    timeout == Duration::zero() ? future.wait() : future.wait(timeout);
  }
  /// `first_free`: the first dimension may differ.
  static std::string described(const at::Tensor& tensor, bool first_free = false) {
    std::string text = tensor.is_sparse() ? "sparse " : "";
    text += c10::toString(tensor.scalar_type());
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      text += i == 0 && first_free ? " *" : " " + std::to_string(tensor.size(i));
    }
    return text + " on " + c10::DeviceTypeName(tensor.device().type(), true);
  }
  Future<std::vector<at::Tensor>> submit(const std::shared_ptr<Arrival>& arrival, std::string call,
                                         Work work) {
    const auto promise = std::make_shared<Promise<std::vector<at::Tensor>>>(exchange_->pool());
    arrival->call = std::move(call) + torchspan::describe(StepPartScope::current());
    arrival->succeed = [promise, raw = arrival.get()] { promise->set_value(raw->results); };
    arrival->fail = [promise](std::exception_ptr error) { promise->set_error(std::move(error)); };
    exchange_->arrive(rank_, arrival, std::move(work));
    return promise->future();
  }
  /// Completes at the same moment as `all`, without a detour through the pool: futures complete in order.
  Future<at::Tensor> first(const std::shared_ptr<Arrival>&, const Future<std::vector<at::Tensor>>& all) {
    return all.then([](const Future<std::vector<at::Tensor>>& done) { return done.wait().at(0); });
  }
  void split_all(Arrivals& all) {
    std::map<int, std::vector<std::pair<int, int>>> by_color;  // (key, rank of this group)
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      ByteReader in(all[rank]->bytes);
      const int color = in.get<int>(), key = in.get<int>();
      by_color[color].emplace_back(key, static_cast<int>(rank));
    }
    for (auto& [color, members] : by_color) {
      std::sort(members.begin(), members.end());
      std::vector<int> ranks;
      for (const auto& [key, rank] : members) ranks.push_back(exchange_->ranks()[rank]);
      const auto made = std::make_shared<Exchange>(exchange_->pool(), ranks, exchange_->options());
      for (std::size_t i = 0; i < members.size(); ++i) {
        Arrival& member = *all[members[i].second];
        member.extra = std::make_shared<Backend>(made, static_cast<int>(i), *member.runtime, made_);
      }
    }
  }

  const std::shared_ptr<Exchange> exchange_;
  const int rank_;
  Runtime& runtime_;
  const std::function<void(const std::shared_ptr<Exchange>&)> made_;
};

}  // namespace in_process

/// A world whose ranks are threads. Made, used and destroyed on threads of its executor.
class InProcessWorld {
 public:
  InProcessWorld(Executor& executor, int size, InProcessOptions options = {})
      : executor_(executor), pool_(std::make_shared<Pool>(executor, PoolOptions{.threads = 4})) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
    note(std::make_shared<in_process::Exchange>(pool_, ranks, options));
    if (options.timeout > Duration::zero()) {
      parker_ = executor.make_parker();
      watch_ = executor.spawn("late ranks", [this, options] { watch(options.timeout); });
    }
  }
  ~InProcessWorld() {
    if (watch_.joinable()) {
      stopping_ = true;
      parker_->unpark();
      watch_.join();
    }
    pool_->stop();
  }
  InProcessWorld(const InProcessWorld&) = delete;

  int size() const { return first()->size(); }
  Executor& executor() const { return executor_; }
  collective::Group group(int rank, Runtime& runtime) {
    return collective::Group(std::make_shared<in_process::Backend>(
        first(), rank, runtime, [this](const std::shared_ptr<in_process::Exchange>& made) { note(made); }));
  }
  /// Kills rank `rank`: all groups that contain it fail.
  void kill(int rank) {
    for (const auto& exchange : all()) {
      const auto& ranks = exchange->ranks();
      if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
        exchange->fail(Error(ErrorKind::kDisconnected, "rank " + std::to_string(rank) + " died"));
      }
    }
  }

 private:
  std::shared_ptr<in_process::Exchange> first() const {
    MutexLock lock(mutex_);
    return exchanges_.front();
  }
  std::vector<std::shared_ptr<in_process::Exchange>> all() const {
    MutexLock lock(mutex_);
    return exchanges_;
  }
  void note(const std::shared_ptr<in_process::Exchange>& exchange) {
    MutexLock lock(mutex_);
    if (std::find(exchanges_.begin(), exchanges_.end(), exchange) == exchanges_.end())
      exchanges_.push_back(exchange);
  }
  void watch(Duration timeout) {
    while (!stopping_) {
      for (const auto& exchange : all()) exchange->look_for_late_ones(executor_.now());
      parker_->park(executor_.deadline_in(timeout / 4));
    }
  }

  Executor& executor_;
  const std::shared_ptr<Pool> pool_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<in_process::Exchange>> exchanges_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<bool> stopping_{false};
  std::unique_ptr<Parker> parker_;
  Thread watch_;
};

}  // namespace torchspan::testing
