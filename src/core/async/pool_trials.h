#pragma once
#include <memory>
#include <utility>

#include <torchspan/detail/core/pool.h>

namespace torchspan {

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
  std::shared_ptr<Pool> host() const { return pool_; }
  /// Stops the pool and drops it; futures find their host gone.
  void destroy() {
    pool_->stop();
    pool_.reset();
  }

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace torchspan
