#include "python/rpc/message_server.h"

#include <optional>
#include <utility>

#include <torchspan/rpc/worker.h>

#include "python/gil.h"
#include "python/rpc/messages.h"

namespace torchspan::python {

void MessageServer::attach(rpc::Registrar& registrar) {
  registrar.handle_raw(
      kTorchMessage, "torch.distributed.rpc", rpc::RunOn::kPool,
      [this, endpoint = registrar.worker().endpoint().get()](
          const rpc::CallInfo& call, wire::Payload& payload, std::shared_ptr<rpc::Completion> reply) {
        std::optional<KeptThreadState> kept;
        if (runs_python(payload)) kept.emplace();
        run({static_cast<std::int64_t>(call.call), std::move(payload), std::move(reply)});
        endpoint->receive_here();
      });
  registrar.handle_raw(
      kGreeting, "greeting", rpc::RunOn::kReceiver,
      [](const rpc::CallInfo&, wire::Payload&, const std::shared_ptr<rpc::Completion>& reply) {
        wire::Payload nothing;
        reply->succeed(nothing);
      });
  registrar.on_departure(callbacks_.departed);
}

void MessageServer::run(Request request) {
  {
    MutexLock lock(mutex_);
    if (free_ == 0) return waiting_.push_back(std::move(request));
    --free_;
  }
  for (;;) {
    callbacks_.serve(request.id, request.payload, std::move(request.reply));
    request = {};  // without the lock
    MutexLock lock(mutex_);
    if (waiting_.empty()) {
      ++free_;
      return;
    }
    request = std::move(waiting_.front());
    waiting_.pop_front();
  }
}

}  // namespace torchspan::python
