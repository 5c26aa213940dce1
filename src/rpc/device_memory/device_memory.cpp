#include "rpc/device_memory/device_memory.h"

#include <fmt/format.h>

#include "device/api/devices.h"
#include "rpc/agent/agent_state.h"

namespace torchspan::rpc {
namespace {

constexpr Duration kOfferTimeout = std::chrono::seconds(30);
constexpr Duration kReturnPause = std::chrono::milliseconds(100);
constexpr Duration kEndedPause = std::chrono::seconds(1);
/// How long tensors go through host memory after a lack of device memory. An attempt empties LibTorch's allocator.
constexpr Duration kNoMemoryPause = std::chrono::minutes(5);

/// Whether both ends of a channel are on this host.
bool stays_on_host(const net::Channel& channel) {
  const std::string peer = channel.peer();
  return peer.starts_with("unix:") || peer.starts_with("tcp:") || peer.starts_with("sim:");
}

/// Bytes of a device whose copies wait until connections have sent them. One tensor may be larger.
constexpr std::size_t kMostCarried = std::size_t{1} << 30;

OfferAnswer unwanted(std::string reason) { return {OfferOutcome::kUnwanted, std::move(reason)}; }

}  // namespace

/// Waits for the answer to an offer. The answer may lead to device memory, so the pool deals with it.
class DeviceMemory::OfferSent final : public Completion {
 public:
  /// `by_connection`: whether the connection carries device memory here.
  OfferSent(std::shared_ptr<DeviceMemory> memory, PeerId to, OfferDeviceMemory offer, bool by_connection)
      : memory_(std::move(memory)), to_(to), offer_(std::move(offer)), by_connection_(by_connection) {}
  void succeed(wire::Payload& reply) override {
    OfferAnswer answer{OfferOutcome::kFailed, "it answered an offer of device memory with other bytes"};
    try {
      answer = wire::from_payload<OfferAnswer>(reply);
    } catch (const Error&) {  // the answer says so
    }
    const auto agent = memory_->agent_.lock();
    if (!agent) return;
    if (answer.outcome == OfferOutcome::kByConnection) {
      if (by_connection_) return memory_->outgoing_.use_connection(to_, offer_.route);
      return memory_->outgoing_.lost(to_, offer_.route);  // it went over another connection than expected
    }
    memory_->state_.continuations->post([memory = memory_, agent, to = to_, offer = offer_, answer] {
      memory->offer_answered(to, offer, answer);
    });
  }
  void fail(std::exception_ptr error) override {
    if (to_error(error).kind() != ErrorKind::kUnsupported) return memory_->outgoing_.lost(to_, offer_.route);
    std::string failure;
    memory_->outgoing_.answered(to_, offer_.route, unwanted({}), failure);
  }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  const PeerId to_;
  const OfferDeviceMemory offer_;
  const bool by_connection_;
};

/// Sends returned memory again until the peer has confirmed it.
class DeviceMemory::ReturnSent final : public Completion {
 public:
  ReturnSent(std::shared_ptr<DeviceMemory> memory, PeerId to, ReleaseDeviceMemory release)
      : memory_(std::move(memory)), to_(to), release_(std::move(release)) {}
  void succeed(wire::Payload&) override {}
  void fail(std::exception_ptr error) override {
    const ErrorKind kind = to_error(error).kind();
    if (kind == ErrorKind::kDisconnected || kind == ErrorKind::kOverloaded)
      memory_->return_failed(to_, release_);
  }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  const PeerId to_;
  const ReleaseDeviceMemory release_;
};

std::shared_ptr<DeviceMemory> DeviceMemory::make(AgentState& state, RunAfter run_after) {
  auto runtime = state.options.device_runtime ? state.options.device_runtime : device::cuda_device_runtime();
  if (!runtime || state.options.device_staging_bytes == 0) return nullptr;
  auto memory = std::make_shared<DeviceMemory>(state, runtime, std::move(run_after));
  memory->incoming_ = std::make_unique<IncomingMemory>(
      runtime, [weak = memory->weak_from_this()](PeerId to, std::uint32_t route, std::uint64_t lease) {
        if (const auto alive = weak.lock()) alive->give_back(to, route, lease);
      });
  return memory;
}

DeviceMemory::DeviceMemory(AgentState& state, std::shared_ptr<const device::DeviceRuntime> runtime,
                           RunAfter run_after)
    : state_(state),
      agent_(state.backend),
      runtime_(std::move(runtime)),
      run_after_(std::move(run_after)),
      shared_(state.runtime.metrics.counter("rpc.device_memory.sent")),
      received_(state.runtime.metrics.counter("rpc.device_memory.received")),
      outgoing_(runtime_, state.options.device_staging_bytes) {}

bool DeviceMemory::reads_parts(PeerId peer) const {
  return state_.peers.protocol(peer.rank).has(kPartsInDeviceMemory);
}

std::shared_ptr<const void> DeviceMemory::room_on(c10::Device device, std::size_t bytes) {
  MutexLock lock(mutex_);
  return carried_.try_emplace(device.str(), kMostCarried).first->second.reserve(bytes);
}

DeviceMemory::Route DeviceMemory::route_to(PeerId to, const at::Tensor& tensor, c10::Device there,
                                           bool carries) {
  if (tensor.nbytes() < kMinBytesOnDevice || to == state_.id()) return {};
  // An area that only parts could use.
  if (tensor.nbytes() > state_.options.device_staging_bytes && !reads_parts(to)) return {};
  OutgoingMemory::Shared shared = outgoing_.share(to, tensor.device(), there, tensor.nbytes());
  Route route{.lent = std::move(shared.tensor)};
  if (carries && shared.device_target != 0) route.room = room_on(tensor.device(), tensor.nbytes());
  if (route.room) route.device_target = shared.device_target;
  if (route.lent || route.room) shared_.add();
  if (shared.offer) {
    if (const auto agent = agent_.lock()) {
      state_.continuations->post(
          [self = shared_from_this(), agent, to, offer = std::move(*shared.offer)]() mutable {
            self->send_offer(to, std::move(offer));
          });
    }
  }
  return route;
}

std::optional<SharedArea> DeviceMemory::area_to(PeerId to, c10::Device here, c10::Device there) const {
  if (!reads_parts(to)) return std::nullopt;
  std::optional<SharedArea> shared = outgoing_.area_to(to, here, there);
  if (shared) shared->sent = &shared_;
  return shared;
}

void DeviceMemory::send_offer(PeerId to, OfferDeviceMemory offer) {
  const auto agent = agent_.lock();
  if (!agent) return;
  bool by_connection = false;
  try {
    const PeerChannels::Link link = state_.channels->to(to.rank);
    if (link.peer != to) return outgoing_.lost(to, offer.route);
    by_connection = link.channel->carries_device_memory() && offer.route < net::kDeviceTargets;
    if (!by_connection && !stays_on_host(*link.channel)) {
      std::string failure;
      outgoing_.answered(to, offer.route, unwanted("on another host"), failure);
      return;
    }
  } catch (const Error&) {  // it has departed
    return outgoing_.lost(to, offer.route);
  }
  Request request = make_request(offer);
  request.deadline = state_.runtime.executor.deadline_in(kOfferTimeout);
  agent->send(to.rank, std::move(request),
              std::make_shared<OfferSent>(shared_from_this(), to, std::move(offer), by_connection));
}

void DeviceMemory::offer_answered(PeerId by, const OfferDeviceMemory& offer, const OfferAnswer& answer) {
  std::string failure;
  auto next = outgoing_.answered(by, offer.route, answer, failure);
  if (outgoing_.lacks_memory(by, offer.route)) {
    state_.runtime.log.warning(
        fmt::format("tensors on {} of worker '{}' (rank {}) go to worker '{}' (rank {}) through host memory "
                    "for {:.0f} s, because the device has too little memory: {}; leave more of it free, or "
                    "lower WorkerOptions::device_staging_bytes",
                    offer.from, state_.self.name, state_.self.rank, state_.peers.name(by.rank), by.rank,
                    to_seconds(kNoMemoryPause), failure));
    begin_again_later(by, offer.route);
  } else if (!failure.empty()) {
    state_.runtime.log.warning(fmt::format(
        "tensors on {} of worker '{}' (rank {}) go to worker '{}' (rank {}) through host memory, because "
        "the two processes cannot share memory of that device: {}; run them in one container and without an "
        "exclusive compute mode, or set WorkerOptions::device_staging_bytes to 0 (logged once per peer)",
        offer.from, state_.self.name, state_.self.rank, state_.peers.name(by.rank), by.rank, failure));
  } else if (answer.outcome == OfferOutcome::kUnwanted && state_.runtime.log.enabled(LogLevel::kDebug)) {
    state_.runtime.log.debug(fmt::format("tensors on {} go to worker '{}' through host memory: {}",
                                         offer.from, state_.peers.name(by.rank), answer.reason));
  }
  if (next) send_offer(by, std::move(*next));
}

void DeviceMemory::begin_again_later(PeerId to, std::uint32_t route) {
  const auto agent = agent_.lock();
  if (!agent || agent->is_stopping()) return;
  agent->after(kNoMemoryPause, [weak = weak_from_this(), to, route] {
    if (const auto self = weak.lock()) self->outgoing_.lost(to, route);
  });
}

/// Runs on the pool.
OfferAnswer DeviceMemory::answer(const IncomingCall& call, const OfferDeviceMemory& offer) {
  const bool by_connection = call.channel && call.channel->carries_device_memory();
  if (!by_connection && (!call.channel || !stays_on_host(*call.channel)))
    return unwanted("the offer came from another host");
  try {
    c10::Device here = device::parse(offer.to);
    if (here.is_cpu()) {
      const auto place = state_.devices.results(call.peer, state_.peers);
      if (!place) return unwanted("there is no device map for results");
      here = place(device::parse(offer.from));
    }
    if (here.type() != runtime_->type()) return unwanted("its tensors go to " + here.str());
    if (const std::string why = device::why_absent(here); !why.empty()) return unwanted(why);
    if (by_connection) {
      incoming_->accept(call.from(), offer, here);
      return {OfferOutcome::kByConnection, {}};
    }
    if (!offer.handle.empty()) incoming_->open(call.from(), offer, here);
    return {OfferOutcome::kAccepted, {}};
  } catch (...) {
    const bool question = offer.handle.empty();
    return {question ? OfferOutcome::kUnwanted : OfferOutcome::kFailed,
            torchspan::describe(std::current_exception()).text};
  }
}

void DeviceMemory::returned(PeerId by, const ReleaseDeviceMemory& release) {
  try {
    outgoing_.returned(by, release);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("refused a message of worker '{}' (rank {}): {}",
                                          state_.peers.name(by.rank), by.rank, error.message()));
  }
}

void DeviceMemory::give_back(PeerId to, std::uint32_t route, std::uint64_t lease) {
  const auto agent = agent_.lock();
  if (!agent || agent->is_stopping()) return;
  {
    MutexLock lock(mutex_);
    returns_[{to, route}].push_back(lease);
    if (returning_.exchange(true)) return;
  }
  run_after_(Duration::zero(), [self = shared_from_this()] { self->send_returns(); });
}

void DeviceMemory::send_returns() {
  if (!returning_.load(std::memory_order_relaxed)) return;
  const auto agent = agent_.lock();
  if (!agent || agent->is_stopping()) return;
  Returns returns;
  {
    MutexLock lock(mutex_);
    returns.swap(returns_);
    returning_.store(false);
  }
  for (auto& [place, leases] : returns) {
    const auto& [to, route] = place;
    received_.add(leases.size());
    const auto peer = state_.peers.find_present(to.rank);
    if (!peer || peer->id() != to) continue;
    ReleaseDeviceMemory release{route, std::move(leases)};
    Request request = make_request(release);
    agent->send(to.rank, std::move(request),
                std::make_shared<ReturnSent>(shared_from_this(), to, std::move(release)));
  }
}

void DeviceMemory::return_failed(PeerId to, ReleaseDeviceMemory release) {
  const auto agent = agent_.lock();
  if (!agent || agent->is_stopping()) return;
  run_after_(kReturnPause, [self = shared_from_this(), to, release = std::move(release)] {
    for (const std::uint64_t lease : release.leases) self->give_back(to, release.route, lease);
  });
}

Buffer DeviceMemory::receive(PeerId from, std::uint32_t target, std::size_t bytes) {
  const c10::Device device = incoming_->device_of(from, target);
  std::optional<Buffer> memory = state_.received.allocate(device, bytes);
  if (!memory) return {};
  // The connection writes the memory beside the device's streams, one of which may have used it before.
  device::Mark(state_.copies.in(device), state_.copies.events()).wait();
  received_.add();
  return *std::move(memory);
}

void DeviceMemory::departed(PeerId peer, const ProcessId& process) {
  incoming_->departed(peer);
  outgoing_.departed(peer, process);
  const auto agent = agent_.lock();
  if (agent && !agent->is_stopping() && outgoing_.free_ended() && !watching_.exchange(true))
    free_ended_later(agent);
}

void DeviceMemory::free_ended_later(const std::shared_ptr<WorkerBackend>& agent) {
  agent->after(kEndedPause, [weak = weak_from_this()] {
    const auto self = weak.lock();
    const auto alive = self ? self->agent_.lock() : nullptr;
    if (!alive || alive->is_stopping()) return;
    if (self->outgoing_.free_ended()) return self->free_ended_later(alive);
    self->watching_.store(false);
  });
}

}  // namespace torchspan::rpc
