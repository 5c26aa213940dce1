#include "pipeline/messages/event_queue.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <utility>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"

namespace torchspan::pipeline {
std::optional<std::uint64_t> step_of(const StepEvent& event) {
  return std::visit(
      [](const auto& held) -> std::optional<std::uint64_t> {
        if constexpr (requires { held.id.step; }) {
          return held.id.step;
        } else {
          return std::nullopt;
        }
      },
      event);
}

void EventQueue::put(StepEvent event) {
  std::optional<Promise<void>> waiting;
  {
    MutexLock lock(mutex_);
    events_.push_back(std::move(event));
    waiting = std::exchange(waiting_, std::nullopt);
  }
  if (waiting) waiting->set_value();
}

std::deque<StepEvent> EventQueue::take(std::uint64_t first, std::uint64_t last) {
  std::deque<StepEvent> here, dropped;  // destroyed after the lock is released
  {
    MutexLock lock(mutex_);
    std::deque<StepEvent> all = std::exchange(later_, {});
    std::move(events_.begin(), events_.end(), std::back_inserter(all));
    events_.clear();
    for (StepEvent& event : all) {
      const auto of = step_of(event);
      const bool wanted = !of || (*of >= first && *of <= last);
      std::deque<StepEvent>& place = wanted ? here : *of > last ? later_ : dropped;
      place.push_back(std::move(event));
    }
  }
  return here;
}

void EventQueue::put_back(std::deque<StepEvent> events) {
  MutexLock lock(mutex_);
  std::move(events.rbegin(), events.rend(), std::front_inserter(later_));
}

Future<void> EventQueue::arrival() {
  MutexLock lock(mutex_);
  if (!events_.empty()) return make_ready_future<void>();
  if (!waiting_) waiting_.emplace(continuations_);
  return waiting_->future();
}

bool EventQueue::wait(Duration limit) { return arrival().wait_for(limit); }

void EventQueue::set_state(std::uint64_t step, bool in_step, bool busy, std::string doing, TimePoint since) {
  MutexLock lock(mutex_);
  state_.step = step;
  state_.in_step = in_step;
  state_.busy = busy;
  state_.doing = std::move(doing);
  since_ = since;
}

void EventQueue::offer(std::vector<at::Tensor> values) {
  MutexLock lock(mutex_);
  offered_.swap(values);
}

std::vector<at::Tensor> EventQueue::offered(const std::vector<std::int32_t>& which) const {
  MutexLock lock(mutex_);
  std::vector<at::Tensor> values;
  for (const std::int32_t index : which) {
    const auto i = static_cast<std::size_t>(index);
    if (index < 0 || i >= offered_.size() || !offered_[i].defined()) {
      throw_invalid(
          "a worker of pipeline '{}' asks for initial value {}, which this worker does not offer: it offers "
          "{}",
          name_, index, offered_.size());
    }
    values.push_back(offered_[i].detach());
  }
  return values;
}

WorkerState EventQueue::state(TimePoint now) const {
  MutexLock lock(mutex_);
  WorkerState state = state_;
  state.seconds = to_seconds(now - since_);
  return state;
}

std::uint64_t PipelineExtension::MessageRouter::next_number(const std::string& name,
                                                            const std::string& workers) {
  MutexLock lock(mutex_);
  return next_numbers_[name + '\n' + workers];
}

PipelineExtension::MessageRouter::Opened PipelineExtension::MessageRouter::open(
    const std::string& name, const std::string& workers, std::uint64_t number,
    std::weak_ptr<ContinuationExecutor> continuations) {
  MutexLock lock(mutex_);
  const std::string key = name + '\n' + workers;
  Opened opened;
  opened.id = wire::digest(fmt::format("{}\n{}", key, number));
  next_numbers_[key] = number + 1;
  opened.event_queue = std::make_shared<EventQueue>(name, std::move(continuations));
  std::erase_if(event_queues_, [](const auto& entry) { return entry.second.expired(); });
  event_queues_[opened.id] = opened.event_queue;
  return opened;
}

std::shared_ptr<EventQueue> PipelineExtension::MessageRouter::find(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = event_queues_.find(id);
  auto event_queue = found == event_queues_.end() ? nullptr : found->second.lock();
  if (!event_queue) {
    throw_invalid(
        "this worker has no such pipeline: it was destroyed here while another worker still uses it");
  }
  return event_queue;
}

void PipelineExtension::MessageRouter::departed(std::uint32_t rank, const Error& error) {
  std::vector<std::shared_ptr<EventQueue>> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, weak] : event_queues_) {
      if (auto event_queue = weak.lock()) all.push_back(std::move(event_queue));
    }
  }
  for (const auto& event_queue : all) event_queue->put(Departure{rank, error});
}

TimePoint PipelineExtension::MessageRouter::now() const {
  const auto worker = worker_.lock();
  return worker ? worker->runtime().executor.now() : TimePoint();
}

PipelineExtension::PipelineExtension() = default;
PipelineExtension::~PipelineExtension() = default;

namespace {

template <rpc::Message M>
void queue_messages(rpc::Registrar& registrar,
                    const std::shared_ptr<PipelineExtension::MessageRouter>& router) {
  registrar.handle<M>(rpc::RunOn::kReceiver, [router](const rpc::CallInfo&, M message) {
    if constexpr (std::is_same_v<M, StepBegin>) message.arrived = router->now();
    const auto event_queue = router->find(message.id.pipeline);
    event_queue->put(std::move(message));
    return Unit{};
  });
}

}  // namespace

void PipelineExtension::attach(rpc::Registrar& registrar) {
  router_ = std::make_shared<MessageRouter>(registrar.worker());
  queue_messages<StepBegin>(registrar, router_);
  queue_messages<Activations>(registrar, router_);
  queue_messages<Gradients>(registrar, router_);
  queue_messages<StepFailed>(registrar, router_);
  queue_messages<PartDone>(registrar, router_);
  queue_messages<StepClosed>(registrar, router_);
  queue_messages<Credit>(registrar, router_);
  queue_messages<TiedGradient>(registrar, router_);
  queue_messages<ReplicaGradients>(registrar, router_);
  queue_messages<ReplicaStatistics>(registrar, router_);
  queue_messages<ReplicaDone>(registrar, router_);
  queue_messages<ReplicaBegin>(registrar, router_);
  registrar.handle<AskState>(rpc::RunOn::kReceiver,
                             [router = router_](const rpc::CallInfo&, const AskState& ask) {
                               return router->find(ask.id.pipeline)->state(router->now());
                             });
  registrar.handle<AskInitialValues>(rpc::RunOn::kPool,
                                     [router = router_](const rpc::CallInfo&, const AskInitialValues& ask) {
                                       return router->find(ask.id.pipeline)->offered(ask.which);
                                     });
  registrar.on_departure(
      [router = router_](std::uint32_t rank, const Error& reason) { router->departed(rank, reason); });
}

}  // namespace torchspan::pipeline
