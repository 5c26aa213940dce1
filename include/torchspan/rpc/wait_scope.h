#pragma once
#include <memory>

#include <torchspan/rpc/worker.h>

namespace torchspan {
namespace rpc {

/// The calls made through one WaitScope. Thread-safe.
class CallGroup {
 public:
  explicit CallGroup(std::weak_ptr<FutureHost> host) : host_(std::move(host)) {}
  void begin();
  void end(std::exception_ptr error);
  /// Done when no call is out, or failed as the first one that fails.
  Future<void> settled();
  /// The same, but waits for all of them in any case.
  Future<void> all_ended();

 private:
  using Promises = std::vector<Promise<void>>;
  const std::weak_ptr<FutureHost> host_;
  Mutex mutex_;
  std::size_t out_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ TORCHSPAN_GUARDED_BY(mutex_);
  Promises settled_ TORCHSPAN_GUARDED_BY(mutex_);
  Promises all_ended_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace rpc

/// The verbs of a Worker whose calls are waited for together:
///   { WaitScope calls(worker); for (auto& shard : shards) calls.rpc_async(shard.worker, kLoad, shard.path);
///     calls.wait(); }
/// wait() returns when every call made through the scope has its reply, and throws the first failure as soon
/// as it happens. The destructor waits for what is still out, whatever becomes of it. For any thread;
/// remote() counts until its creation is confirmed.
class WaitScope : public Caller {
 public:
  explicit WaitScope(const Worker& worker, CallOptions options = {});
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;

  void wait(Deadline deadline = Deadline::never());
  void wait(Duration timeout);
};

}  // namespace torchspan
