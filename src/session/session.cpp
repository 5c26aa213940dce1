#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/session.h>

#include "autograd/api/running_passes.h"
#include "core/api/observation.h"
#include "core/api/parse_number.h"
#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"
#include "device/api/device_runtime.h"
#include "rendezvous/api/environment.h"
#include "rendezvous/api/worker_network.h"
#include "session/session_on_host.h"

namespace torchspan {
namespace {

rendezvous::MembershipOptions join_options(const WorkerOptions& options, const FunctionTable& functions,
                                           const SessionDisguise& disguise) {
  rendezvous::MembershipOptions join;
  join.host_id = disguise.host_mark;
  join.wire = disguise.wire;
  join.store = disguise.store;
  join.name = options.environment.name;
  join.rank = options.environment.rank;
  join.world_size = options.environment.world_size;
  join.store_address = options.environment.store_address();
  join.job = options.environment.job;
  join.functions_digest = functions.digest();
  join.functions = functions.descriptions();
  join.require_same_functions = options.require_same_functions;
  join.timeout = no_limit_if_zero(options.environment.join_timeout);
  join.dead_after = std::max(options.network.tls.dead_after, 2 * join.heartbeat);
  return join;
}

rpc::ServiceOptions service_options(const WorkerOptions& options) {
  rpc::ServiceOptions service;
  service.name = options.environment.name;
  service.rank = static_cast<std::uint32_t>(std::max(options.environment.rank, 0));
  service.default_timeout = options.rpc_timeout;
  service.connect_timeout = options.connect_timeout;
  service.stopped_limit = options.stopped_limit;
  service.shutdown_limit = options.shutdown_timeout;
  service.device_maps = options.device_maps;
  service.device_staging_bytes = options.device_staging_bytes;
  service.threads = options.threads;
  service.max_threads = options.max_threads;
  service.max_pending_calls = options.max_pending_calls;
  service.max_waiting_bytes = options.max_waiting_bytes;
  service.report_leaks = options.report_leaks;
  service.strict_leaks = options.strict_leaks;
  return service;
}

rendezvous::WorkerNetworkOptions network_options(const WorkerOptions& options,
                                                 const SessionDisguise& disguise) {
  rendezvous::WorkerNetworkOptions network{options.environment, options.network, {}, disguise.host_mark};
  network.transport.secret =
      options.secret.empty() ? rendezvous::load_secret(options.environment) : options.secret;
  network.transport.max_unsent = options.max_unsent_bytes;
  if (options.device_staging_bytes != 0 && device::cuda_device_runtime())
    network.transport.device_memory = net::DeviceMemoryKind::kCuda;
  return network;
}

/// Encodes a worker's calls as JSON: those that wait for a reply, those that it serves, its threads, and the backward
/// passes in which it takes part.
std::string encode_calls(const DebugInfo& info, const std::vector<autograd::RunningPass>& passes) {
  using nlohmann::json;
  json pending = json::array(), serving = json::array();
  for (const DebugInfo::Pending& call : info.pending) {
    json entry = {
        {"call", call.call}, {"to", call.to}, {"site", call.site}, {"seconds", to_seconds(call.age)}};
    if (call.left != Duration::max()) entry["left"] = to_seconds(call.left);
    pending.push_back(std::move(entry));
  }
  for (const DebugInfo::Serving& call : info.serving) {
    serving.push_back(
        {{"call", call.call}, {"from", call.from}, {"seconds", to_seconds(call.age)}, {"begun", call.begun}});
  }
  json running = json::array();
  for (const autograd::RunningPass& pass : passes) {
    running.push_back({{"id", pass.id}, {"busy", pass.busy}, {"waits", pass.waits}});
  }
  return json{{"pending", pending},
              {"serving", serving},
              {"passes", running},
              {"threads", info.pool_threads},
              {"queued", info.pool_queued},
              {"sent", info.calls_sent},
              {"handled", info.calls_handled},
              {"references",
               {{"owned", info.references.owners},
                {"shared", info.references.forks},
                {"unconfirmed", info.references.pending_users}}}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

constexpr Duration kWeek = std::chrono::hours(24 * 7);

/// The value of a variable; an empty value counts as not set.
std::optional<std::string> text_of(const rendezvous::Environment& environment, const std::string& name) {
  const auto found = environment.find(name);
  if (found == environment.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

/// A limit in seconds, or nullopt if the variable is not set.
std::optional<Duration> read_seconds(const rendezvous::Environment& environment, const std::string& name) {
  const auto value = text_of(environment, name);
  if (!value) return std::nullopt;
  const std::string& text = *value;
  const double seconds = parse_number<double>(text).value_or(-1), most = to_seconds(kWeek);
  if (!(seconds >= 0 && seconds <= most)) {
    throw_invalid("{} is '{}'; expected a number of seconds from 0 (no limit) to {}", name, text, most);
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

WorkerOptions WorkerOptions::from_env() {
  const rendezvous::Environment environment = rendezvous::process_environment();
  WorkerOptions options;
  options.environment = rendezvous::read_environment(environment);
  options.network = rendezvous::read_network(environment);
  if (const auto level = text_of(environment, "TORCHSPAN_LOG_LEVEL"))
    options.log_level = parse_log_level(*level);
  options.observation = ObservationOptions::from(environment);
  if (const auto timeout = read_seconds(environment, "TORCHSPAN_RPC_TIMEOUT")) options.rpc_timeout = *timeout;
  if (const auto limit = read_seconds(environment, "TORCHSPAN_STOPPED_LIMIT")) {
    options.stopped_limit = *limit;
    Duration& silence = options.network.tls.dead_after;
    silence = *limit == Duration::zero() ? kWeek : std::max(silence, *limit);
  }
  return options;
}

class Session::Impl {
 public:
  Impl(const WorkerOptions& options, FunctionTable functions, Extensions extensions,
       const SessionDisguise& disguise)
      : runtime_owner_(make_own_runtime(options.environment.name, options.log_level)),
        leave_timeout_(no_limit_if_zero(options.leave_timeout)),
        error_file_(options.environment.error_file),
        exceptions_(std::uncaught_exceptions()) {
    rpc::ServiceOptions service = service_options(options);
    rpc::WorkerService::MakeTransport make_transport;
    std::optional<rendezvous::WorkerNetwork> network;
    rendezvous::MembershipOptions join = join_options(options, functions, disguise);
    if (options.environment.world_size != 1) {
      network.emplace(runtime_, network_options(options, disguise));
      service.listen = network->listen();
      join.store_listen = network->store_listen();
      make_transport = [&](net::Handler& handler) { return network->make_transport(handler); };
    }
    service_ = std::make_unique<rpc::WorkerService>(runtime_owner_, std::move(functions), service,
                                                    make_transport, std::move(extensions));
    if (network) join.address = network->advertised_address(service_->address());
    service_->start(rendezvous::Membership::join(
        runtime_, network ? network->store_transports() : rendezvous::TransportFactory(), std::move(join)));
    observe(options);
    if (runtime_.log.enabled(LogLevel::kDebug)) {
      const Worker& worker = service_->worker();
      runtime_.log.debug(fmt::format("process {} joined as rank {} of {}, listening at {}", ::getpid(),
                                     worker.rank(), worker.world_size(),
                                     service_->address().empty() ? "nothing" : service_->address()));
    }
  }

  ~Impl() {
    try {
      leave();
    } catch (...) {
      runtime_.log.error(describe(std::current_exception()).text);
    }
  }

  void shutdown(Deadline deadline) {
    runtime_.check_process();
    left_ = true;
    service_->shutdown(deadline);
  }
  void shutdown(Duration timeout) { shutdown(runtime_.executor.deadline_in(timeout)); }
  void shutdown() { shutdown(Deadline::never()); }
  void abort(const std::string& why) {
    runtime_.check_process();
    left_ = true;
    service_->stop("left because its program failed: " + why);
  }

  const std::string& error_file() const { return error_file_; }
  Runtime& runtime() { return runtime_; }
  const std::shared_ptr<Runtime>& runtime_owner() const { return runtime_owner_; }
  rpc::WorkerService& service() { return *service_; }

 private:
  void observe(const WorkerOptions& options) {
    const Worker worker = service_->worker();
    TraceIdentity identity =
        identify(runtime_.executor, options.environment.name, worker.rank(), worker.world_size());
    identity.run = options.environment.job;
    identity.attempt = options.environment.restart_count;
    observation_.emplace(runtime_owner_, options.observation, identity, [worker](StateDetail detail) {
      return encode_calls(worker.debug(), detail == StateDetail::kFull
                                              ? autograd::running_passes(worker)
                                              : std::vector<autograd::RunningPass>());
    });
  }

  void leave() {
    if (left_) return;
    if (std::uncaught_exceptions() > exceptions_) return abort("an exception ended the scope of its Session");
    if (!service_->worker().current_call()) shutdown(leave_timeout_);
  }

  const std::shared_ptr<Runtime> runtime_owner_;
  Runtime& runtime_{*runtime_owner_};
  const Duration leave_timeout_;
  const std::string error_file_;
  const int exceptions_;  ///< number in flight when the session was constructed
  bool left_ = false;
  std::optional<Observation> observation_;  ///< ends after the service, so that it sees all of its work
  std::unique_ptr<rpc::WorkerService> service_;
};

Session::Session(const WorkerOptions& options, FunctionTable functions, Extensions extensions, OnlyThese)
    : impl_(std::make_unique<Impl>(options, std::move(functions), std::move(extensions), SessionDisguise())) {
}
Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;

Session make_session(const SessionDisguise& disguise, WorkerOptions options, FunctionTable functions,
                     Extensions extensions) {
  return Session(
      std::make_unique<Session::Impl>(options, std::move(functions), std::move(extensions), disguise));
}

Worker& Session::worker() { return impl_->service().worker(); }
Runtime& Session::runtime() { return impl_->runtime(); }
const std::shared_ptr<Runtime>& Session::runtime_owner() const { return impl_->runtime_owner(); }
rendezvous::Membership& Session::membership() { return impl_->service().membership(); }
void Session::shutdown() { impl_->shutdown(); }
void Session::shutdown(Duration timeout) { impl_->shutdown(timeout); }
void Session::abort(const std::exception_ptr& cause) {
  write_error_file(impl_->error_file(), cause);
  const ExceptionDescription description = describe(cause);
  impl_->abort(fmt::format("{}: {}", description.type, description.text));
}

}  // namespace torchspan
