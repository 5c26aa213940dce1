#include "python/rpc/agent.h"

#include <algorithm>
#include <deque>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_profiling_req.h>
#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/unpickled_python_remote_call.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/rpc/worker.h>

#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/greeting.h"

namespace torchspan::python {
namespace {

namespace torch_rpc = torch::distributed::rpc;
using std::chrono::milliseconds;

/// How long after a departure what waits for the worker fails.
constexpr Duration kDepartureTime = std::chrono::seconds(1);

milliseconds to_milliseconds(float seconds) {
  return milliseconds(static_cast<std::int64_t>(seconds * torch_rpc::kSecToMsConversion));
}

/// The error of a call as torch's layers above expect it: they look for the text of a time-out.
std::exception_ptr to_rpc_error(const std::exception_ptr& error, milliseconds timeout) {
  const Error ours = to_error(error);
  std::string text = fmt::format("torchspan: {}", ours.what());
  if (ours.kind() == ErrorKind::kTimedOut && timeout > milliseconds::zero() && ours.elapsed() >= timeout) {
    text = torch_rpc::makeRPCError(
        fmt::format("RPC ran for more than set timeout ({} ms) and will now be marked with an error: {}",
                    timeout.count(), text),
        torch_rpc::RPCErrorType::TIMEOUT);
  }
  return std::make_exception_ptr(std::runtime_error(text));
}

/// Completes the future of a call, on the pool: what waits for the future may take the GIL, or wait for another call.
class PendingReply final : public rpc::Completion {
 public:
  struct Call {
    c10::intrusive_ptr<JitFuture> future;
    std::shared_ptr<rpc::WorkerBackend> backend;
    std::shared_ptr<AgentCounters> counters;
    milliseconds timeout;
    const DeviceMaps* device_maps;  ///< of the agent, which outlives its calls
    TorchDeviceMap device_map;
    std::string to;
  };
  explicit PendingReply(Call call) : call_(std::move(call)) { call_.counters->client_calls.fetch_add(1); }

  void succeed(wire::Payload& reply) override {
    post([reply = std::move(reply)](Call& call) mutable { complete(call, reply); });
  }
  void fail(std::exception_ptr error) override {
    post(
        [error = std::move(error)](Call& call) { call.future->setError(to_rpc_error(error, call.timeout)); });
  }

 private:
  template <class F>
  void post(F end) {
    const std::shared_ptr<ContinuationExecutor> continuations = call_.backend->continuations().lock();
    continuations->post([call = std::move(call_), end = std::move(end)]() mutable {
      const KeptThreadState kept;
      end(call);
      // After the callbacks of the future, which may make more calls.
      call.counters->client_calls.fetch_sub(1);
      call.future.reset();
      call.backend->receive_here();
    });
  }

  static void complete(Call& call, wire::Payload& reply) {
    try {
      ReceivedTorchMessage received = from_payload(reply, 0);
      TorchMessage& message = *received.message;
      if (message.type() == torch_rpc::MessageType::EXCEPTION) {
        const std::string text(message.payload().begin(), message.payload().end());
        return call.future->setError(std::make_exception_ptr(std::runtime_error(text)));
      }
      if (!received.devices.empty()) {
        DeviceMaps::place(message.tensors(),
                          call.device_maps->results(received.devices, call.to, call.device_map));
      }
      auto [value, storages] = torch_rpc::withStorages(std::move(received.message));
      call.future->markCompleted(c10::IValue(std::move(value)), std::move(storages));
    } catch (...) {
      call.future->setError(to_rpc_error(std::current_exception(), {}));
    }
  }

  Call call_;
};

/// Serves requests as torch does, and releases references whose release came before their creation had ended. The creator of
/// a reference releases it after a time-out while its function still runs here. torch's owner does not know the reference
/// then, ignores the release, and keeps the reference for ever.
class RequestCallback final : public torch_rpc::RequestCallbackImpl {
 public:
  /// The first step of a request: its arguments may wait for other references.
  std::unique_ptr<torch_rpc::RpcCommandBase> deserializePythonRpcCommand(
      std::unique_ptr<torch_rpc::RpcCommandBase> command, const torch_rpc::MessageType& type) const override {
    const std::optional<torch_rpc::ForkId> fork = fork_created_by(*command, type);
    if (!fork) return RequestCallbackImpl::deserializePythonRpcCommand(std::move(command), type);
    {
      MutexLock lock(mutex_);
      released_.try_emplace(*fork, false);
    }
    try {
      return RequestCallbackImpl::deserializePythonRpcCommand(std::move(command), type);
    } catch (...) {
      end_creation(*fork);
      throw;
    }
  }
  c10::intrusive_ptr<JitFuture> processPythonRemoteCall(
      torch_rpc::RpcCommandBase& command, const std::vector<c10::Stream>& streams) const override {
    const auto& call = static_cast<const torch_rpc::UnpickledPythonRemoteCall&>(command);
    return create(call.rrefId(), call.forkId(),
                  [&] { return RequestCallbackImpl::processPythonRemoteCall(command, streams); });
  }
  c10::intrusive_ptr<JitFuture> processScriptRemoteCall(
      torch_rpc::RpcCommandBase& command, const std::vector<c10::Stream>& streams) const override {
    const auto& call = static_cast<const torch_rpc::ScriptRemoteCall&>(command);
    return create(call.retRRefId(), call.retForkId(),
                  [&] { return RequestCallbackImpl::processScriptRemoteCall(command, streams); });
  }
  c10::intrusive_ptr<JitFuture> processRpcWithErrors(torch_rpc::RpcCommandBase& command,
                                                     const torch_rpc::MessageType& type,
                                                     const std::vector<c10::Stream>& streams) const override {
    if (type == torch_rpc::MessageType::RREF_USER_DELETE &&
        note_release(static_cast<torch_rpc::RRefUserDelete&>(command).forkId())) {
      return asFuture(torch_rpc::RRefAck().toMessage());
    }
    return RequestCallbackImpl::processRpcWithErrors(command, type, streams);
  }

 private:
  /// The reference that a request makes, if it makes one.
  static std::optional<torch_rpc::ForkId> fork_created_by(torch_rpc::RpcCommandBase& command,
                                                          torch_rpc::MessageType type) {
    namespace autograd = torch::distributed::autograd;
    switch (type) {
      case torch_rpc::MessageType::PYTHON_REMOTE_CALL:
        return torch_rpc::ForkId::fromIValue(
            static_cast<const torch_rpc::PythonRemoteCall&>(command).retForkId());
      case torch_rpc::MessageType::SCRIPT_REMOTE_CALL:
        return static_cast<const torch_rpc::ScriptRemoteCall&>(command).retForkId();
      case torch_rpc::MessageType::FORWARD_AUTOGRAD_REQ: {
        auto& outer = static_cast<autograd::RpcWithAutograd&>(command);
        return fork_created_by(outer.wrappedRpc(), outer.wrappedMessageType());
      }
      case torch_rpc::MessageType::RUN_WITH_PROFILING_REQ: {
        auto& outer = static_cast<autograd::RpcWithProfilingReq&>(command);
        return fork_created_by(outer.wrappedRpc(), outer.wrappedMessageType());
      }
      default:
        return std::nullopt;
    }
  }
  /// Runs torch's creation, which registers the fork with the owner.
  template <class F>
  c10::intrusive_ptr<JitFuture> create(const torch_rpc::RRefId& reference, const torch_rpc::ForkId& fork,
                                       F&& torch_creates) const {
    c10::intrusive_ptr<JitFuture> future;
    try {
      future = torch_creates();
    } catch (...) {
      end_creation(fork);
      throw;
    }
    if (end_creation(fork)) {
      auto released = torch_rpc::RRefContext::getInstance().delForkOfOwner(reference, fork);
      handleRRefDelete(released);
    }
    return future;
  }
  /// Whether the fork is being created here; its creation then releases it.
  bool note_release(const torch_rpc::ForkId& fork) const {
    MutexLock lock(mutex_);
    const auto found = released_.find(fork);
    if (found == released_.end()) return false;
    found->second = true;
    return true;
  }
  /// Whether the fork was released meanwhile.
  bool end_creation(const torch_rpc::ForkId& fork) const {
    MutexLock lock(mutex_);
    const auto found = released_.find(fork);
    if (found == released_.end()) return false;
    const bool released = found->second;
    released_.erase(found);
    return released;
  }

  mutable Mutex mutex_;
  /// Whether references that are being created were released.
  mutable std::unordered_map<torch_rpc::ForkId, bool, torch_rpc::ForkId::Hash> released_
      TORCHSPAN_GUARDED_BY(mutex_);
};

/// The message in the future of torch's handler, or the exception.
TorchMessagePtr result_of(JitFuture& future, std::int64_t id) {
  if (!future.hasError()) {
    auto message = future.value().toCustomClass<TorchMessage>();
    message->setId(id);
    return message;
  }
  return torch_rpc::createExceptionResponse(future.tryRetrieveErrorMessage(), id);
}

void answer(const TorchMessage& message, rpc::Completion& reply) {
  wire::Payload payload = to_payload(message, DeviceMaps::of(message.tensors()));
  reply.succeed(payload);
}

/// Refuses a world of which other workers have a size, and vice versa.
void check_kind(c10d::Store& store, const Place& place) {
  const std::string kind = place.size == rendezvous::kOpenWorld ? "dynamic" : "static";
  if (text_of(store.compareSet("torchspan/kind", {}, bytes_of(kind))) == kind) return;
  throw_invalid(
      "RPC group mixes statically and dynamically initialized members which is not supported. {} is given no "
      "world_size and others are: give all of them the same",
      place.size == rendezvous::kOpenWorld ? place.name : "Another worker");
}

std::string name_key(int rank) { return fmt::format("torchspan/name/{}", rank); }

/// torch's words for workers with the same name, in front of ours.
Error explain_failed_join(c10d::Store& store, const Place& place, const Error& error) {
  std::set<std::string> names;
  for (int rank = 0; error.kind() == ErrorKind::kInvalid && rank < place.size; ++rank) {
    if (!store.check({name_key(rank)})) continue;
    const std::string name = text_of(store.get(name_key(rank)));
    if (names.insert(name).second) continue;
    return Error(error.kind(), fmt::format("RPC worker name {} is not unique: {}", name, error.message()));
  }
  return error;
}

/// Receives the messages of torch.distributed.rpc from the others. Its handlers run on the worker's pool, at most
/// `threads` at a time, so that threads are left for replies while all of them wait.
class MessageServer final : public rpc::Extension {
 public:
  struct Callbacks {
    std::function<void(const SpanLink& call, wire::Payload& request, std::shared_ptr<rpc::Completion> reply)>
        serve;
    /// A member died or left; on a thread that must not wait.
    std::function<void(std::uint32_t rank, const Error& reason)> departed;
  };
  MessageServer(std::size_t threads, Callbacks callbacks)
      : callbacks_(std::move(callbacks)), free_(threads) {}

  void attach(rpc::Registrar& registrar) override;

 private:
  struct Request {
    SpanLink call = {};
    wire::Payload payload;
    std::shared_ptr<rpc::Completion> reply;
  };
  void run(Request request);

  const Callbacks callbacks_;
  Mutex mutex_;
  std::size_t free_ TORCHSPAN_GUARDED_BY(mutex_);  ///< handlers that may begin
  std::deque<Request> waiting_ TORCHSPAN_GUARDED_BY(mutex_);
};

void MessageServer::attach(rpc::Registrar& registrar) {
  registrar.handle_raw(
      kTorchMessage, "torch.distributed.rpc", rpc::RunOn::kPool,
      [this, backend = registrar.worker().backend().get()](const rpc::CallInfo& call, wire::Payload& payload,
                                                           std::shared_ptr<rpc::Completion> reply) {
        std::optional<KeptThreadState> kept;
        if (runs_python(payload)) kept.emplace();
        run({{.id = call.call, .peer = static_cast<std::int32_t>(call.peer)},
             std::move(payload),
             std::move(reply)});
        backend->receive_here();
      });
  answer_greetings(registrar);
  registrar.on_departure(callbacks_.departed);
}

void MessageServer::run(Request request) {
  {
    MutexLock lock(mutex_);
    if (free_ == 0) return waiting_.push_back(std::move(request));
    --free_;
  }
  for (;;) {
    callbacks_.serve(request.call, request.payload, std::move(request.reply));
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

}  // namespace

TorchWorker WorkerDirectory::worker_of(const rendezvous::Member& member) const {
  if (member.rank == membership_->self().rank) return self_;
  return {member.name, static_cast<std::int64_t>(member.rank)};
}

template <class Matches>
const TorchWorker& WorkerDirectory::find_if(const Matches& matches, const std::string& what) const {
  if (matches(self_)) return self_;
  MutexLock lock(mutex_);
  const bool may_change = membership_->open();
  if (!may_change) {
    const auto found = std::ranges::find_if(known_, matches);
    if (found != known_.end()) return *found;
  }
  std::vector<std::string> names;
  for (const TorchWorker& worker : all()) {
    names.push_back(worker.name_);
    if (!matches(worker)) continue;
    const auto same = std::ranges::find_if(
        known_, [&](const TorchWorker& one) { return one.id_ == worker.id_ && one.name_ == worker.name_; });
    return same != known_.end() ? *same : known_.emplace_back(worker);
  }
  throw std::runtime_error(fmt::format("torchspan: worker {} could not find destination {}; there are {}",
                                       self_.name_, what, fmt::join(names, ", ")));
}

const TorchWorker& WorkerDirectory::find(const std::string& name) const {
  return find_if([&](const TorchWorker& worker) { return worker.name_ == name; },
                 fmt::format("worker '{}'", name));
}

const TorchWorker& WorkerDirectory::find(torch::distributed::rpc::worker_id_t id) const {
  return find_if([&](const TorchWorker& worker) { return worker.id_ == id; }, fmt::format("id {}", id));
}

std::vector<TorchWorker> WorkerDirectory::all() const {
  std::vector<TorchWorker> workers;
  for (const rendezvous::Member& member : membership_->members()) {
    if (!membership_->open() || membership_->is_present(member.rank)) workers.push_back(worker_of(member));
  }
  return workers;
}

std::uint32_t WorkerDirectory::rank_of(const TorchWorker& worker) const {
  return static_cast<std::uint32_t>(worker.id_ == self_.id_ ? membership_->self().rank : worker.id_);
}

std::string WorkerDirectory::name_of(std::uint32_t rank) const {
  return membership_->member(static_cast<int>(rank)).name;
}

const TorchDeviceMap& DeviceMaps::to(const std::string& worker) const {
  const auto found = maps_.find(worker);
  return found == maps_.end() ? none_ : found->second;
}

std::vector<c10::Device> DeviceMaps::of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  bool any = false;
  for (const at::Tensor& tensor : tensors) {
    devices.push_back(tensor.device());
    any |= !tensor.device().is_cpu();
  }
  if (!any) devices.clear();
  return devices;
}

std::vector<c10::Device> DeviceMaps::arguments(const std::vector<at::Tensor>& tensors,
                                               const std::string& worker, const TorchDeviceMap& given) const {
  const TorchDeviceMap& map = given.empty() ? to(worker) : given;
  std::vector<c10::Device> devices;
  if (map.empty()) {
    devices = of(tensors);
    if (devices.empty() || worker == self_) return devices;
  }
  devices.clear();
  for (const at::Tensor& tensor : tensors) {
    const auto place = map.find(tensor.device());
    TORCH_CHECK(
        place != map.end() || tensor.device().is_cpu(),
        fmt::format("torchspan: worker {} sends a tensor on {} to worker {}, and has no device map for it: "
                    "add it with set_device_map() of the options, on all workers, or send tensor.cpu()",
                    self_, tensor.device().str(), worker));
    devices.push_back(place != map.end() ? place->second : tensor.device());
  }
  return devices;
}

std::vector<c10::Device> DeviceMaps::results(const std::vector<c10::Device>& there, const std::string& worker,
                                             const TorchDeviceMap& given) const {
  if (worker == self_) return there;
  const TorchDeviceMap& map = given.empty() ? to(worker) : given;
  std::vector<c10::Device> devices;
  for (const c10::Device& device : there) {
    c10::Device here = c10::kCPU;
    bool found = device.is_cpu();
    for (const auto& [from, to] : map) {
      if (to != device) continue;
      here = from;
      found = true;
    }
    TORCH_CHECK(
        found,
        fmt::format("torchspan: worker {} returns a tensor on {}, to which the device map of worker {} "
                    "maps no device: add it with set_device_map() of the options, or return "
                    "tensor.cpu()",
                    worker, device.str(), self_));
    devices.push_back(here);
  }
  return devices;
}

void DeviceMaps::place(std::vector<at::Tensor>& tensors, const std::vector<c10::Device>& devices) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (tensors[i].device() == devices[i]) continue;
    const bool requires_grad = tensors[i].requires_grad();
    tensors[i] = tensors[i].detach().to(devices[i]).set_requires_grad(requires_grad);
  }
}

std::shared_ptr<Agent> Agent::join(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                                   Options options) {
  check_kind(*store, place);
  store->set(name_key(place.rank), bytes_of(place.name));
  try {
    Job job(store.get(), place, std::max<Duration>(options.timeout, std::chrono::seconds(60)));
    return {new Agent(job, store, std::move(options)), EndsWithInterpreter()};
  } catch (const Error& error) {
    throw explain_failed_join(*store, place, error);
  }
}

Agent::Agent(Job& job, const c10::intrusive_ptr<c10d::Store>& store, Options options)
    : RpcAgent(TorchWorker(job.environment().name, static_cast<std::int64_t>(job.place().rank)),
               std::make_unique<RequestCallback>(), options.timeout),
      store_(store),
      threads_(options.threads),
      device_maps_(job.environment().name, std::move(options.device_maps)),
      devices_(std::move(options.devices)),
      on_departure_(std::move(options.on_departure)),
      counters_(std::make_shared<AgentCounters>()),
      directory_(workerInfo_),
      runtime_(job.runtime()) {
  rpc::ServiceOptions service;
  service.name = workerInfo_.name_;
  service.threads = 2 * static_cast<std::size_t>(threads_);
  service.max_threads = std::max<std::size_t>(service.max_threads, 2 * service.threads);
  service.report_leaks = false;
  std::vector<std::unique_ptr<rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<MessageServer>(
      static_cast<std::size_t>(threads_),
      MessageServer::Callbacks{
          [this](const SpanLink& call, wire::Payload& request,
                 const std::shared_ptr<rpc::Completion>& reply) { serve(call, request, reply); },
          [this](std::uint32_t rank, const Error& reason) { departed(rank, reason); }}));
  std::string address;
  std::tie(service_, address) = job.make_service(std::move(service), FunctionTable(), std::move(extensions));
  backend_ = service_->worker().backend();
  joined_ = job.join(address);
  membership_ = joined_.get();
  directory_.begin(*membership_);
  observation_ = job.observe(membership_->self().name);
}

Agent::~Agent() {
  if (rpcAgentRunning_.load()) shutdown();
}

Deadline Agent::call_deadline() const {
  return runtime_->executor.deadline_in(no_limit_if_zero(Duration(getRpcTimeout())));
}

std::vector<std::string> Agent::gather(const std::string& tag, const std::string& bytes) {
  const std::vector<Bytes> all =
      membership_->all_gather_bytes(tag, std::as_bytes(std::span(bytes)), {}, call_deadline());
  std::vector<std::string> texts;
  for (const Bytes& one : all) texts.emplace_back(reinterpret_cast<const char*>(one.data()), one.size());
  return texts;
}

void Agent::startImpl() {
  with_rpc_errors([this] {
    service_->start(std::move(joined_));
    if (membership_->open()) greet_members(backend(), *membership_, call_deadline());
  });
}

c10::intrusive_ptr<JitFuture> Agent::send(const TorchWorker& to, TorchMessagePtr message, float timeout,
                                          const TorchDeviceMap& device_map) {
  with_rpc_errors([this] { process_.check(workerInfo_.name_); });
  TORCH_CHECK(message->isRequest(),
              "torchspan: send() takes requests; replies go where their requests came from");
  TORCH_CHECK(
      rpcAgentRunning_.load(),
      fmt::format("Node {} tried to send() a message of type {} but RPC is no longer running on this node.",
                  workerInfo_.id_, static_cast<int>(message->type())));
  TORCH_CHECK_VALUE(timeout == torch_rpc::kUnsetRpcTimeout || timeout >= 0, "torchspan: timeout is ", timeout,
                    "; expected 0 (no limit) or more seconds, or -1: the worker's default");
  const milliseconds limit =
      timeout == torch_rpc::kUnsetRpcTimeout ? getRpcTimeout() : to_milliseconds(timeout);
  auto future = c10::make_intrusive<JitFuture>(c10::AnyClassType::get(), devices_);
  rpc::Request request;
  request.type = kTorchMessage;
  request.name = name_of(message->type());
  request.user_call = is_call(message->type());
  request.payload = to_payload(*message, device_maps_.arguments(message->tensors(), to.name_, device_map));
  if (limit != milliseconds::zero()) request.deadline = runtime_->executor.deadline_in(limit);
  request.served_late = true;  // its references must arrive
  backend().send(directory_.rank_of(to), std::move(request),
                 std::make_shared<PendingReply>(PendingReply::Call{future, backend_, counters_, limit,
                                                                   &device_maps_, device_map, to.name_}));
  return future;
}

void Agent::serve(const SpanLink& call, wire::Payload& request,
                  const std::shared_ptr<rpc::Completion>& reply) {
  const auto id = static_cast<std::int64_t>(call.id);
  const TimePoint begin = runtime_->executor.now();
  const char* name = nullptr;
  counters_->server_calls.fetch_add(1);
  counters_->running_handlers.fetch_add(1);
  c10::intrusive_ptr<JitFuture> future;
  try {
    ReceivedTorchMessage received = from_payload(request, id);
    if (is_call(received.message->type())) name = name_of(received.message->type());
    DeviceMaps::place(received.message->tensors(), received.devices);
    // torch's legacy profiler leaves its state behind on this thread, where the next request could not be profiled.
    const at::ThreadLocalStateGuard restored{at::ThreadLocalState()};
    future = (*cb_)(*received.message, {});
  } catch (const std::exception& error) {
    future = c10::make_intrusive<JitFuture>(c10::AnyClassType::get());
    future->setError(std::make_exception_ptr(std::runtime_error(error.what())));
  }
  const auto answered = [counters = counters_, runtime = runtime_, reply, call, begin, name,
                         id](JitFuture& done) {
    if (name != nullptr) runtime->spans.record(SpanKind::kHandler, name, begin, call);
    answer(*result_of(done, id), *reply);
    counters->server_calls.fetch_sub(1);
  };
  counters_->running_handlers.fetch_sub(1);
  if (future->completed()) {
    answered(*future);
  } else {
    counters_->server_async_calls.fetch_add(1);
    future->addCallback([answered, counters = counters_](JitFuture& done) {
      answered(done);
      counters->server_async_calls.fetch_sub(1);
    });
  }
}

void Agent::departed(std::uint32_t rank, const Error& reason) {
  if (!on_departure_ || reason.kind() == ErrorKind::kCancelled) return;  // this worker itself stops
  // What it sent before its end may still be on its way from others.
  backend().after(kDepartureTime, [this, name = directory_.name_of(rank), text = std::string(reason.what())] {
    on_departure_(name, text);
  });
}

void Agent::join(bool shutdown, float timeout) {
  const Deadline deadline =
      timeout == 0 ? Deadline::never() : runtime_->executor.deadline_in(to_milliseconds(timeout));
  with_rpc_errors([&] {
    if (!shutdown) return wait_for_all(deadline);
    Job::end_open_world(*store_, *membership_);
    service_->shutdown(deadline);
  });
}

/// Rounds until no worker has a call, and none was made between two of them.
void Agent::wait_for_all(Deadline deadline) {
  std::uint64_t before = 0;
  for (bool again = false;; again = true) {
    while (counters_->client_calls.load() != 0 || counters_->server_calls.load() != 0) {
      if (deadline.passed(runtime_->executor.now()))
        throw Error(ErrorKind::kTimedOut, "calls are outstanding:\n" + backend().debug().str());
      runtime_->executor.sleep(std::chrono::milliseconds(2));
    }
    if (membership_->open()) return;  // there is no fixed set of workers
    const rendezvous::CountSums sums =
        membership_->sum("torchspan.rpc.join", {backend().debug().calls_sent}, {}, {}, {.until = deadline});
    const std::uint64_t sent = sums.counts.at(0);
    if (again && sent == before) return;
    before = sent;
  }
}

void Agent::shutdownImpl() {
  with_rpc_errors([this] { service_->stop("left without a graceful rpc.shutdown()"); });
  observation_.reset();  // torch keeps the agent until the process exits
}

void Agent::stop_at_exit() {
  if (process_.is_current()) stop_before_exit(*runtime_, backend_, [this] { shutdown(); });
}

std::unordered_map<std::string, std::string> Agent::getMetrics() {
  const auto text = [](std::int64_t number) { return std::to_string(number); };
  const AgentCounters& counters = *counters_;
  std::unordered_map<std::string, std::string> metrics{
      {"agent.thread_pool_size", text(threads_)},
      {"agent.num_idle_threads",
       text(std::max<std::int64_t>(0, threads_ - counters.running_handlers.load()))},
      {"agent.client_active_calls", text(counters.client_calls.load())},
      {"agent.server_active_calls", text(counters.server_calls.load())},
      {"agent.server_active_async_calls", text(counters.server_async_calls.load())}};
  if (isGILProfilingEnabled()) {
    const std::int64_t waits = counters.gil_waits.load();
    metrics["agent.gil_average_wait_time_us"] = text(waits == 0 ? 0 : counters.gil_wait_us.load() / waits);
  }
  return metrics;
}

std::unordered_map<std::string, std::string> Agent::getDebugInfo() {
  auto info = getMetrics();
  info["agent.calls"] = backend().debug().str();
  return info;
}

void Agent::addGilWaitTime(std::chrono::microseconds time) {
  counters_->gil_waits.fetch_add(1);
  counters_->gil_wait_us.fetch_add(time.count());
}

}  // namespace torchspan::python
