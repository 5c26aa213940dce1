#pragma once
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <utility>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/pool.h>

#include "core/api/sim_executor.h"
#include "tests/support/environment.h"

namespace torchspan {

/// For tests: runs `body(SimExecutor&)` as the main thread of a simulated process, once for each seed from 1
/// on; stops at the first seed that fails a check, and names it. TORCHSPAN_CASES replaces the number of seeds.
template <class Body>
void for_seeds(std::uint64_t seeds, Body body) {
  const std::uint64_t last = testing::number_from("TORCHSPAN_CASES", seeds);
  for (std::uint64_t seed = 1; seed <= last; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    SimExecutor executor(seed);
    executor.run([&] { body(executor); });
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "the first seed that fails is " << seed;
      return;
    }
  }
}

/// For tests: runs `body(Executor&)` a few times on real threads and then simulated for each seed, so that a
/// test covers both executors.
template <class Body>
void everywhere(std::uint64_t seeds, Body body) {
  for (int round = 0; round < 5 && !::testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE("real threads");
    const auto executor = make_executor();
    body(static_cast<Executor&>(*executor));
  }
  for_seeds(seeds, [&](SimExecutor& executor) { body(static_cast<Executor&>(executor)); });
}

/// For tests: stops a pool before the last reference to it can be dropped elsewhere.
class OwnedPool {
 public:
  explicit OwnedPool(Executor& executor, PoolOptions options = {})
      : pool_(std::make_shared<Pool>(executor, std::move(options))) {}
  ~OwnedPool() {
    if (pool_) pool_->stop();
  }
  OwnedPool(const OwnedPool&) = delete;

  Pool* operator->() const { return pool_.get(); }
  Pool& operator*() const { return *pool_; }
  std::shared_ptr<Pool> continuations() const { return pool_; }
  /// Stops the pool and drops it; futures find their host gone.
  void destroy() {
    pool_->stop();
    pool_.reset();
  }

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace torchspan
