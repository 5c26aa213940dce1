#pragma once
#include <atomic>
#include <cstddef>
#include <memory>

namespace torchspan::rpc {

/// Limits the bytes that are in use at a time. Thread-safe; reservations may outlive it.
class ByteBudget {
 public:
  explicit ByteBudget(std::size_t most) : most_(most) {}

  /// Reserves bytes until the last copy of the result is gone; null if they are too many. A single reservation may be
  /// larger than the limit.
  std::shared_ptr<const void> reserve(std::size_t bytes) const {
    std::size_t used = used_->load();
    do {
      if (used != 0 && (used > most_ || bytes > most_ - used)) return nullptr;
    } while (!used_->compare_exchange_weak(used, used + bytes));
    return {used_.get(), [counted = used_, bytes](const void*) { counted->fetch_sub(bytes); }};
  }

 private:
  const std::size_t most_;
  const std::shared_ptr<std::atomic<std::size_t>> used_ = std::make_shared<std::atomic<std::size_t>>(0);
};

}  // namespace torchspan::rpc
