#include <fmt/format.h>

#include <torchspan/detail/rpc/service.h>

#include "rpc/agent/agent.h"

namespace torchspan::rpc {

class WorkerService::Impl {
 public:
  std::shared_ptr<RpcAgent> agent;
};

WorkerService::WorkerService(Runtime& runtime, FunctionTable functions, ServiceOptions options,
                             MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions)
    : WorkerService(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &runtime), std::move(functions),
                    std::move(options), std::move(make_transport), std::move(extensions)) {}

WorkerService::WorkerService(std::shared_ptr<Runtime> runtime, FunctionTable functions,
                             ServiceOptions options, MakeTransport make_transport,
                             std::vector<std::unique_ptr<Extension>> extensions)
    : impl_(std::make_unique<Impl>()) {
  impl_->agent = make_process_shared<RpcAgent>(std::move(runtime), std::move(functions), std::move(options));
  impl_->agent->open(make_transport);
  impl_->agent->attach(std::move(extensions));
}

WorkerService::~WorkerService() {
  if (!impl_->agent->runtime().executor.process().is_current()) return;
  try {
    stop();
    impl_->agent->release();
  } catch (...) {
    impl_->agent->runtime().log.error(
        fmt::format("this worker could not be stopped when its Session or WorkerService was destroyed, and "
                    "stays in memory; destroy the object on a thread that the program started: {}",
                    describe(std::current_exception()).text));
    impl_->agent->keep_alive();  // its threads still use it
  }
}

const std::string& WorkerService::address() const { return impl_->agent->address(); }
void WorkerService::start(std::unique_ptr<rendezvous::Membership> membership) {
  impl_->agent->start(std::move(membership));
}
rendezvous::Membership& WorkerService::membership() { return impl_->agent->membership(); }
Worker& WorkerService::worker() { return impl_->agent->worker(); }
void WorkerService::shutdown(Deadline deadline) { impl_->agent->shutdown(deadline); }
void WorkerService::stop(const std::string& why) { impl_->agent->stop(why); }

}  // namespace torchspan::rpc
