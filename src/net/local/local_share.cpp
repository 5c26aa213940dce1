#include "net/local/local_share.h"

namespace torchspan::net {
namespace {

Metrics& metrics_of(const LocalOptions& options, Metrics& own) {
  return options.metrics != nullptr ? *options.metrics : own;
}

}  // namespace

LocalShare::LocalShare(LocalOptions given, LocalFaults given_faults)
    : options(std::move(given)),
      faults(std::move(given_faults)),
      lent(metrics_of(options, own_metrics).counter("net.local.lent")),
      adopted(metrics_of(options, own_metrics).counter("net.local.adopted")),
      copied(metrics_of(options, own_metrics).counter("net.local.copied")),
      inlined(metrics_of(options, own_metrics).counter("net.local.inlined")),
      pooled(metrics_of(options, own_metrics).gauge("net.local.pool_bytes")) {}

bool LocalShare::reserve(std::uint64_t size) {
  std::uint64_t before = reserved.load(std::memory_order_relaxed);
  do {
    if (size > options.pool_bytes || before > options.pool_bytes - size) return false;
  } while (!reserved.compare_exchange_weak(before, before + size, std::memory_order_relaxed));
  pooled.add(size);
  return true;
}

void LocalShare::release(std::uint64_t size) {
  reserved.fetch_sub(size, std::memory_order_relaxed);
  pooled.subtract(size);
}

void LocalShare::add_pool(std::weak_ptr<BlockPool> pool) {
  MutexLock lock(mutex_);
  std::erase_if(pools_, [](const auto& known) { return known.expired(); });
  pools_.push_back(std::move(pool));
}

std::vector<std::shared_ptr<BlockPool>> LocalShare::pools() {
  std::vector<std::shared_ptr<BlockPool>> all;
  MutexLock lock(mutex_);
  for (const auto& known : pools_) {
    if (auto pool = known.lock()) all.push_back(std::move(pool));
  }
  return all;
}

}  // namespace torchspan::net
