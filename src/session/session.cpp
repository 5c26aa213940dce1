#include <algorithm>
#include <fmt/format.h>
#include <random>
#include <unistd.h>

#include <torchspan/core/executor.h>
#include <torchspan/net/local.h>
#include <torchspan/optim/steps.h>
#include <torchspan/session/session.h>

namespace torchspan {
namespace {

/// Where this worker's own transport listens; short, since socket paths may have 107 bytes.
std::string listening_address(const WorkerOptions& options) {
  if (options.environment.world_size == 1) return {};
  const std::string folder = rendezvous::make_runtime_folder(options.environment);
  if (options.environment.rank != rendezvous::kAnyRank)
    return fmt::format("unix:{}/{}-{}.sock", folder, getpid(), options.environment.rank);
  std::random_device random;
  return fmt::format("unix:{}/{}-{:08x}.sock", folder, getpid(), random());
}

rendezvous::JoinOptions join_options(const WorkerOptions& options, const FunctionTable& functions,
                                     const std::string& address) {
  rendezvous::JoinOptions join;
  join.name = options.environment.name;
  join.rank = options.environment.rank;
  join.world_size = options.environment.world_size;
  join.store_address = options.environment.store_address();
  join.address = address;
  join.job = options.environment.job;
  join.functions_digest = functions.digest();
  join.functions = functions.descriptions();
  join.require_same_functions = options.require_same_functions;
  join.timeout = options.environment.join_timeout;
  return join;
}

rpc::ServiceOptions service_options(const WorkerOptions& options) {
  rpc::ServiceOptions service;
  service.name = options.environment.name;
  service.rank = static_cast<std::uint32_t>(std::max(options.environment.rank, 0));
  service.listen = listening_address(options);
  service.default_timeout = options.rpc_timeout;
  service.threads = options.threads;
  service.max_threads = options.max_threads;
  service.max_pending_calls = options.max_pending_calls;
  service.max_waiting_bytes = options.max_waiting_bytes;
  return service;
}

}  // namespace

WorkerOptions WorkerOptions::from_env() {
  const rendezvous::Environment environment = rendezvous::process_environment();
  WorkerOptions options;
  options.environment = rendezvous::read_environment(environment);
  if (auto level = environment.find("TORCHSPAN_LOG_LEVEL"); level != environment.end()) {
    options.log_level = parse_log_level(level->second);
  }
  return options;
}

class Session::Impl {
 public:
  Impl(const WorkerOptions& options, FunctionTable functions,
       std::vector<std::unique_ptr<rpc::Extension>> extensions)
      : executor_(make_executor()), runtime_(*executor_, options.environment.name, options.log_level) {
    const bool alone = options.environment.world_size == 1;
    const net::Secret secret =
        alone || !options.secret.empty() ? options.secret : rendezvous::load_secret(options.environment);
    extensions.insert(extensions.begin(), std::make_unique<optim::Steps>());
    extensions.insert(extensions.begin(), std::make_unique<autograd::Passes>());
    rpc::WorkerService::MakeTransport make_transport;
    if (!alone) {
      make_transport = [&](net::Handler& handler) {
        net::TransportOptions transport;
        transport.secret = secret;
        transport.max_unsent = options.max_unsent_bytes;
        return net::make_local_transport(*executor_, handler, std::move(transport));
      };
    }
    service_ = std::make_unique<rpc::WorkerService>(runtime_, functions, service_options(options),
                                                    make_transport, std::move(extensions));
    service_->start(rendezvous::Membership::join(runtime_, rendezvous::stream_transports(*executor_, secret),
                                                 join_options(options, functions, service_->address())));
  }

  Runtime& runtime() { return runtime_; }
  rpc::WorkerService& service() { return *service_; }

 private:
  const std::unique_ptr<Executor> executor_;
  Runtime runtime_;
  std::unique_ptr<rpc::WorkerService> service_;
};

Session::Session(WorkerOptions options, FunctionTable functions,
                 std::vector<std::unique_ptr<rpc::Extension>> extensions)
    : impl_(std::make_unique<Impl>(options, std::move(functions), std::move(extensions))) {}
Session::~Session() = default;

Worker& Session::worker() { return impl_->service().worker(); }
Runtime& Session::runtime() { return impl_->runtime(); }
void Session::shutdown() { impl_->service().shutdown(); }
void Session::shutdown(Duration timeout) {
  impl_->service().shutdown(impl_->runtime().executor.deadline_in(timeout));
}

}  // namespace torchspan
