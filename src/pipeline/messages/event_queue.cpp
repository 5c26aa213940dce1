#include "pipeline/messages/event_queue.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <utility>

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
  if (!waiting_) waiting_.emplace(host_);
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
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("a worker of pipeline '{}' asks for initial value {}, which this worker does not "
                      "offer: it offers {}",
                      name_, index, offered_.size()));
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

}  // namespace torchspan::pipeline
