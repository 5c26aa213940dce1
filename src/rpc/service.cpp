#include <fmt/format.h>

#include <torchspan/detail/rpc/service.h>

#include "rpc/agent.h"

namespace torchspan::rpc {

/// What an extension sees of the core while it is attached.
class CoreRegistrar final : public Registrar {
 public:
  explicit CoreRegistrar(RpcAgent& core) : core_(core) {}
  Worker& worker() override { return core_.worker(); }
  Runtime& runtime() override { return core_.runtime(); }
  std::weak_ptr<FutureHost> host() override { return core_.host(); }
  void intercept(Interceptor& interceptor) override { core_.interceptors_.push_back(&interceptor); }
  void on_departure(std::function<void(std::uint32_t, const Error&)> callback) override {
    core_.departure_callbacks_.push_back(std::move(callback));
  }
  void on_shutdown(std::function<Future<void>()> callback) override {
    core_.shutdown_hooks_.push_back(std::move(callback));
  }
  void handle_raw(wire::MessageType type, std::string name, RunOn where, RawHandler handler) override {
    core_.add_handler(type, {std::move(name), where, false,
                             [handler = std::move(handler)](const IncomingPtr& call,
                                                            const std::shared_ptr<Completion>& reply) {
                               handler(call->info, call->payload, reply);
                             }});
  }

 private:
  RpcAgent& core_;
};

void RpcAgent::add_handler(wire::MessageType type, Entry entry) {
  const std::string name = entry.name;
  auto [it, fresh] = handlers_.emplace(static_cast<std::uint16_t>(type), std::move(entry));
  if (!fresh) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("message type {:#06x} is taken by '{}', so '{}' cannot have it",
                            static_cast<int>(type), it->second.name, name));
  }
}

void RpcAgent::attach(std::vector<std::unique_ptr<Extension>> extensions) {
  CoreRegistrar registrar(*this);
  for (auto& extension : extensions) {
    Extension& one = *extension;
    const auto [it, fresh] = extensions_.emplace(typeid(one), std::move(extension));
    if (!fresh) {
      throw Error(ErrorKind::kInvalid, fmt::format("extension {} was given twice", demangle(typeid(one))));
    }
    one.attach(registrar);
  }
}

class WorkerService::Impl {
 public:
  std::shared_ptr<RpcAgent> core;
};

WorkerService::WorkerService(Runtime& runtime, FunctionTable functions, ServiceOptions options,
                             MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions)
    : WorkerService(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &runtime), std::move(functions),
                    std::move(options), std::move(make_transport), std::move(extensions)) {}

WorkerService::WorkerService(std::shared_ptr<Runtime> runtime, FunctionTable functions,
                             ServiceOptions options, MakeTransport make_transport,
                             std::vector<std::unique_ptr<Extension>> extensions)
    : impl_(std::make_unique<Impl>()) {
  impl_->core = std::make_shared<RpcAgent>(std::move(runtime), std::move(functions), std::move(options));
  impl_->core->open(make_transport);
  impl_->core->attach(std::move(extensions));
}

WorkerService::~WorkerService() {
  try {
    stop();
    impl_->core->release();
  } catch (...) {
    impl_->core->runtime().log.error(
        fmt::format("this worker could not be stopped as its Session or WorkerService ended, and stays in "
                    "memory; end that on a thread of the program's own: {}",
                    describe(std::current_exception()).text));
    impl_->core->stay_in_memory();  // its threads still use it
  }
}

const std::string& WorkerService::address() const { return impl_->core->address(); }
void WorkerService::start(std::unique_ptr<rendezvous::Membership> membership) {
  impl_->core->start(std::move(membership));
}
rendezvous::Membership& WorkerService::membership() { return impl_->core->membership(); }
Worker& WorkerService::worker() { return impl_->core->worker(); }
void WorkerService::shutdown(Deadline deadline) { impl_->core->shutdown(deadline); }
void WorkerService::stop(const std::string& why) { impl_->core->stop(why); }

}  // namespace torchspan::rpc
