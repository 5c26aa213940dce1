#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/detail/core/metrics.h>
#include <torchspan/detail/core/mutex.h>

#include "net/api/local.h"
#include "net/local/local_faults.h"

namespace torchspan::net {

class BlockPool;

/// Shared by the channels of one transport. Lent and adopted blocks keep it after the end of the transport.
struct LocalShare {
  explicit LocalShare(LocalOptions options, LocalFaults faults = {});

  /// Reserves room for `size` bytes in the pool; returns false if there is none.
  bool reserve(std::uint64_t size);
  void release(std::uint64_t size);
  void add_pool(std::weak_ptr<BlockPool> pool);
  std::vector<std::shared_ptr<BlockPool>> pools();

  const LocalOptions options;
  const LocalFaults faults;
  Metrics own_metrics;  ///< used if the options name none
  Counter &lent, &adopted, &copied, &inlined;
  Counter& pooled;                              ///< bytes
  std::atomic<std::uint64_t> reserved{0};       ///< bytes of the blocks of this side
  std::atomic<std::uint64_t> adopted_bytes{0};  ///< bytes of the peers' blocks that are Buffers of this side

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<BlockPool>> pools_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::net
