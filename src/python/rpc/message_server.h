#pragma once
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/extension.h>

namespace torchspan::python {

/// Receives the messages of torch.distributed.rpc from the others. Its handlers run on the worker's pool, at most
/// `threads` at a time, so that threads are left for replies while all of them wait.
class MessageServer final : public rpc::Extension {
 public:
  struct Callbacks {
    std::function<void(std::int64_t id, wire::Payload& request, std::shared_ptr<rpc::Completion> reply)>
        serve;
    /// A member died or left; on a thread that must not wait.
    std::function<void(std::uint32_t rank, const Error& reason)> departed;
  };
  MessageServer(std::size_t threads, Callbacks callbacks)
      : callbacks_(std::move(callbacks)), free_(threads) {}

  void attach(rpc::Registrar& registrar) override;

 private:
  struct Request {
    std::int64_t id = 0;
    wire::Payload payload;
    std::shared_ptr<rpc::Completion> reply;
  };
  void run(Request request);

  const Callbacks callbacks_;
  Mutex mutex_;
  std::size_t free_ TORCHSPAN_GUARDED_BY(mutex_);  ///< handlers that may begin
  std::deque<Request> waiting_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::python
