#include "net/ucx/ucx_worker.h"

#include <cstring>
#include <fmt/format.h>
#include <optional>
#include <utility>

namespace torchspan::net {
namespace {

constexpr int kSteps = 32;
constexpr std::size_t kMostArrivedBytes = 4 << 20;
/// Limits of the waits in the destructor: for peers to receive what was sent, and for UCX itself.
constexpr Duration kPatienceWithPeers = std::chrono::seconds(1);
/// UCX may have endpoints of peers that have just connected, to which this side has no reference.
constexpr Duration kCalm = std::chrono::milliseconds(25);
constexpr Duration kPatienceAtEnd = std::chrono::seconds(2);

unsigned id_of(UcxTask::Kind kind) { return static_cast<unsigned>(kind); }

std::optional<UcxLabel> label_of(const void* header, std::size_t size) {
  UcxLabel label;
  if (size != sizeof label) return std::nullopt;
  std::memcpy(&label, header, sizeof label);
  return label;
}

/// Gives up ownership of the memory that operations use.
void leak(std::unordered_map<const UcxTask*, UcxTaskPtr>& tasks) {
  for (auto& [key, task] : tasks) {
    task->channel.reset();
    task->route.reset();
    static_cast<void>(task.release());
  }
  tasks.clear();
}

/// Tells UCX in which memory an operation's bytes are, if they are on a device.
void add_memory_type(std::uint32_t device_target, DeviceMemoryKind kind, ucp_request_param_t& param) {
  if (device_target == 0) return;
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = kind == DeviceMemoryKind::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

}  // namespace

UcxWorker::UcxWorker(Executor& executor, const UcxOptions& options, DeviceMemoryKind device_memory)
    : executor_(executor), context_(executor, library_, options, device_memory) {
  try {
    make_worker();
  } catch (...) {
    tear_down();
    throw;
  }
}

void UcxWorker::make_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = library_.worker_create(context_.handle(), &params, &worker_);
  if (status == UCS_OK) status = library_.worker_get_efd(worker_, &event_descriptor_);
  ucp_address_t* address = nullptr;
  std::size_t size = 0;
  if (status == UCS_OK) status = library_.worker_get_address(worker_, &address, &size);
  if (status != UCS_OK) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("UCX cannot start on its devices ({}): see UCX_LOG_LEVEL", text_of(status)));
  }
  address_.assign(reinterpret_cast<const std::byte*>(address),
                  reinterpret_cast<const std::byte*>(address) + size);
  library_.worker_release_address(worker_, address);
  listen_for(UcxTask::Kind::kHello, hello_arrived);
  listen_for(UcxTask::Kind::kChunk, chunk_arrived);
  listen_for(UcxTask::Kind::kSegment, segment_arrived);
}

void UcxWorker::listen_for(UcxTask::Kind kind, ucp_am_recv_callback_t callback) {
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                     UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = id_of(kind);
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = callback;
  param.arg = this;
  const ucs_status_t status = library_.set_am_handler(worker_, &param);
  if (status != UCS_OK) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("this UCX has no active messages ({}): install UCX 1.13 or later", text_of(status)));
  }
}

UcxWorker::~UcxWorker() { tear_down(); }

void UcxWorker::tear_down() {
  if (worker_ != nullptr) {
    // UCX 1.13 aborts when an endpoint is closed before its part of connecting was sent.
    for_routes([this](UcxRoute& route) TORCHSPAN_UNCHECKED { end(route.endpoint_, Ending::kFlush); });
    settle(kPatienceWithPeers, [this]() TORCHSPAN_UNCHECKED { return closing_ == 0; });
    bool connecting = is_unpaired_;
    for_routes([&](UcxRoute& route) TORCHSPAN_UNCHECKED { connecting |= !route.is_connected_; });
    const bool leaks = connecting && !library_.can_destroy_while_connecting();
    for_routes([&](UcxRoute& route) TORCHSPAN_UNCHECKED {
      if (route.is_connected_ || !leaks) end(std::exchange(route.endpoint_, nullptr), Ending::kClose);
    });
    settle(leaks ? kCalm : kPatienceAtEnd,
           [this]() TORCHSPAN_UNCHECKED { return under_way_.empty() && closing_ == 0; });
    if (leaks) {
      MutexLock lock(mutex_);
      context_.leak();
      return leak(under_way_);
    }
    library_.worker_destroy(worker_);
  }
}

void UcxWorker::for_routes(const std::function<void(UcxRoute&)>& step) {
  MutexLock lock(mutex_);
  for (const auto& route : routes_) {
    if (route->endpoint_ != nullptr) step(*route);
  }
}

void UcxWorker::settle(Duration patience, const std::function<bool()>& done) {
  const Deadline deadline = executor_.deadline_in(patience);
  Deadline calm = executor_.deadline_in(kCalm);
  for (;; executor_.yield()) {
    if (progress()) calm = executor_.deadline_in(kCalm);
    const Events dropped = take_events();
    for (const Arrival& arrival : dropped.arrivals) {
      if (arrival.offer.descriptor != nullptr) release(arrival.offer.descriptor);
    }
    const TimePoint now = executor_.now();
    if (deadline.passed(now)) return;
    MutexLock lock(mutex_);
    if (calm.passed(now) && done()) return;
  }
}

std::shared_ptr<UcxRoute> UcxWorker::open_route(BytesView address) {
  auto route = std::make_shared<UcxRoute>();
  route->worker_ = this;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = failed;
  params.err_handler.arg = route.get();
  MutexLock lock(mutex_);
  std::erase_if(routes_, [](const auto& old) { return old->endpoint_ == nullptr && old.use_count() == 1; });
  const ucs_status_t status = library_.ep_create(worker_, &params, &route->endpoint_);
  if (status != UCS_OK) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("UCX cannot reach it ({}): UcxOptions must be the same on all workers, and their "
                            "devices on one network",
                            text_of(status)));
  }
  routes_.push_back(route);
  return route;
}

/// Takes over the task while UCX begins with it: UCX may call back before it returns.
template <class Begin>
UcxWorker::Outcome UcxWorker::start(UcxTaskPtr& task, const Begin& begin) {
  const UcxTask& its = *task;
  under_way_[&its] = std::move(task);
  const ucs_status_ptr_t request = begin(its);
  if (request != nullptr && !UCS_PTR_IS_ERR(request)) return Outcome::kUnderWay;
  auto back = under_way_.extract(&its);
  if (back.empty()) return Outcome::kUnderWay;  // it did call back
  task = std::move(back.mapped());
  return request == nullptr ? Outcome::kDone : Outcome::kFailed;
}

UcxWorker::Outcome UcxWorker::send(UcxRoute& route, UcxTaskPtr& task, bool patient) {
  if (patient) {
    MutexLock lock(mutex_);
    return send_locked(route, task);
  }
  if (!mutex_.try_lock()) return Outcome::kBusy;
  const Outcome outcome = send_locked(route, task);
  mutex_.unlock();
  return outcome;
}

UcxWorker::Outcome UcxWorker::send_locked(UcxRoute& route, UcxTaskPtr& task) {
  if (route.endpoint_ == nullptr) return Outcome::kFailed;
  const bool is_eager = task->kind != UcxTask::Kind::kSegment;
  task->worker = this;
  task->route = route.shared_from_this();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = is_eager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  param.cb.send = finished;
  param.user_data = task.get();
  add_memory_type(task->segment.device_target, device_memory(), param);
  const void* const data = is_eager ? task->chunk.data() : task->segment.data;
  const std::size_t size = is_eager ? task->chunk.size() : task->segment.size;
  const Outcome outcome = start(task, [&](const UcxTask& its) {
    return library_.am_send(route.endpoint_, id_of(its.kind), &its.label, sizeof its.label, data, size,
                            &param);
  });
  route.is_connected_ |= outcome == Outcome::kDone;
  return outcome;
}

UcxWorker::Outcome UcxWorker::fetch(const UcxRoute& route, void* descriptor, UcxTaskPtr& task) {
  MutexLock lock(mutex_);
  // Without its endpoint, UCX 1.13 would never complete it.
  if (route.endpoint_ == nullptr) {
    library_.am_release(worker_, descriptor);
    return Outcome::kFailed;
  }
  task->worker = this;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = fetched;
  param.user_data = task.get();
  add_memory_type(task->into.device_target, device_memory(), param);
  return start(task, [&](const UcxTask& its) {
    return library_.am_receive(worker_, descriptor, its.into.data, its.into.size, &param);
  });
}

void UcxWorker::release(void* descriptor) {
  MutexLock lock(mutex_);
  library_.am_release(worker_, descriptor);
}

bool UcxWorker::progress() {
  MutexLock lock(mutex_);
  bool any = false;
  for (int step = 0; step < kSteps && arrived_bytes_ < kMostArrivedBytes; ++step) {
    if (library_.worker_progress(worker_) == 0) break;
    any = true;
  }
  close_failed();
  return any;
}

bool UcxWorker::has_events() const {
  MutexLock lock(mutex_);
  return !news_.empty();
}

UcxWorker::Events UcxWorker::take_events() {
  MutexLock lock(mutex_);
  arrived_bytes_ = 0;
  return std::exchange(news_, {});
}

UcxWorker::Armed UcxWorker::arm() {
  MutexLock lock(mutex_);
  const ucs_status_t status = library_.worker_arm(worker_);
  return status == UCS_OK ? Armed::kYes : status == UCS_ERR_BUSY ? Armed::kBusy : Armed::kFailed;
}

// UCX calls the following functions from inside its own, so the calling thread holds the lock.

void UcxWorker::finish(UcxTask* task, void* request, ucs_status_t status) {
  library_.request_free(request);
  auto taken = under_way_.extract(task);
  if (taken.empty()) return;
  taken.mapped()->status = status;
  if (status == UCS_OK && taken.mapped()->route) taken.mapped()->route->is_connected_ = true;
  news_.finished.push_back(std::move(taken.mapped()));
}

void UcxWorker::finished(void* request, ucs_status_t status, void* task) {
  auto* const its = static_cast<UcxTask*>(task);
  its->worker->finish(its, request, status);
}

void UcxWorker::fetched(void* request, ucs_status_t status, std::size_t /*size*/, void* task) {
  auto* const its = static_cast<UcxTask*>(task);
  its->worker->finish(its, request, status);
}

void UcxWorker::closed(void* request, ucs_status_t /*status*/, void* worker) {
  auto& self = *static_cast<UcxWorker*>(worker);
  self.library_.request_free(request);
  --self.closing_;
}

void UcxWorker::failed(void* route, ucp_ep_h endpoint, ucs_status_t status) {
  auto& its = *static_cast<UcxRoute*>(route);
  UcxWorker& self = *its.worker_;
  if (its.endpoint_ == nullptr) return;
  its.endpoint_ = nullptr;
  self.to_close_.push_back(endpoint);
  self.news_.failed.push_back({&its, self.library_.status_string(status)});
}

ucs_status_t UcxWorker::hello_arrived(void* worker, const void* header, std::size_t header_size,
                                      void* /*data*/, std::size_t size,
                                      const ucp_am_recv_param_t* /*param*/) {
  auto& self = *static_cast<UcxWorker*>(worker);
  const auto label = label_of(header, header_size);
  if (label) self.news_.arrivals.push_back({UcxTask::Kind::kHello, *label, UcxOffer{.size = size}});
  return UCS_OK;
}

ucs_status_t UcxWorker::chunk_arrived(void* worker, const void* header, std::size_t header_size, void* data,
                                      std::size_t size, const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<UcxWorker*>(worker);
  const auto label = label_of(header, header_size);
  const bool is_here = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (!label) return UCS_OK;
  UcxOffer offer{.size = size};
  // An offer that is not a chunk keeps its size and has no bytes: its channel ends with an error.
  if (is_here && size <= kUcxChunkBytes) {
    const auto* const bytes = static_cast<const std::byte*>(data);
    offer.bytes.assign(bytes, bytes + size);
  }
  self.arrived_bytes_ += offer.bytes.size();
  self.news_.arrivals.push_back({UcxTask::Kind::kChunk, *label, std::move(offer)});
  return UCS_OK;
}

ucs_status_t UcxWorker::segment_arrived(void* worker, const void* header, std::size_t header_size, void* data,
                                        std::size_t size, const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<UcxWorker*>(worker);
  const auto label = label_of(header, header_size);
  if (!label) return UCS_OK;
  UcxOffer offer{.size = size};
  ucs_status_t answer = UCS_OK;
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    offer.descriptor = data;
    answer = UCS_INPROGRESS;
  } else {
    const auto* const bytes = static_cast<const std::byte*>(data);
    offer.bytes.assign(bytes, bytes + size);
  }
  self.arrived_bytes_ += offer.bytes.size();
  self.news_.arrivals.push_back({UcxTask::Kind::kSegment, *label, std::move(offer)});
  return answer;
}

void UcxWorker::close_failed() {
  for (ucp_ep_h endpoint : std::exchange(to_close_, {})) end(endpoint, Ending::kClose);
}

void UcxWorker::end(ucp_ep_h endpoint, Ending ending) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = closed;
  param.user_data = this;
  ucs_status_ptr_t request = nullptr;
  if (ending == Ending::kFlush) {
    request = library_.ep_flush(endpoint, &param);
  } else {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    request = library_.ep_close(endpoint, &param);
  }
  if (request != nullptr && !UCS_PTR_IS_ERR(request)) ++closing_;
}

}  // namespace torchspan::net
