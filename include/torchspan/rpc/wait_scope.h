#pragma once
#include <memory>

#include <torchspan/rpc/worker.h>

namespace torchspan {
/// The verbs of a Worker whose calls are waited for together:
///   { WaitScope calls(worker); for (auto& shard : shards) calls.rpc_async(shard.worker, kLoad, shard.path);
///     calls.wait(); }
/// wait() returns when every call made through the scope has its reply, and throws the first failure as soon
/// as it happens. The destructor waits for what is still out, whatever becomes of it: where the pool has no
/// thread left it gets another one. remote() counts until its creation is confirmed. For any thread; throws
/// Error{kInvalid} in a function declared kInline.
class WaitScope : public Caller {
 public:
  explicit WaitScope(const Worker& worker, CallOptions options = {});
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;

  void wait(Deadline deadline = Deadline::never());
  void wait(Duration timeout);
};

}  // namespace torchspan
