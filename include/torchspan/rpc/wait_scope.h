#pragma once
#include <memory>

#include <torchspan/rpc/worker.h>

namespace torchspan {
/// A Caller whose calls are waited for together:
///   { WaitScope calls(worker); for (auto& shard : shards) calls.rpc_async(shard.worker, kLoad, shard.path);
///     calls.wait(); }
/// wait() returns when every call has its reply, or throws the first failure at once; remote() counts until
/// confirmed. The destructor waits for the rest, ignores failures and may add a thread to an exhausted
/// pool. Thread-safe. Throws Error{kInvalid} in a function declared kInline.
class WaitScope : public Caller {
 public:
  explicit WaitScope(const Worker& worker, CallOptions options = {});
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;

  void wait(Deadline deadline = Deadline::never());
  void wait(Duration timeout);
};

}  // namespace torchspan
