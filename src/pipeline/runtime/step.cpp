#include "pipeline/runtime/step.h"

#include <fmt/format.h>
#include <utility>

#include "pipeline/layers/micro_batches.h"
#include "pipeline/runtime/step_failures.h"

namespace torchspan::pipeline {

using schedule::Action;
using schedule::ActionKind;

Step::Step(const LocalPipeline& local, StepWork work)
    : local_(local),
      work_(std::move(work)),
      split_(work_.begin.rows),
      watch_(local),
      constants_(local),
      actions_(local, work_.begin, work_.table),
      cache_(work_.cache != nullptr ? work_.cache->tensors() : CacheTensors()),
      passes_(local, work_.begin, actions_, work_.cache != nullptr ? &cache_ : nullptr),
      input_(local, work_.begin, std::move(work_.input)),
      output_(split_.micro_batches()),
      record_(local, work_.begin),
      closing_(local, work_.begin),
      exchange_(local, work_.begin) {
  if (!local_.owns_layer_range(0)) return;
  for (int i = 0; i < split_.micro_batches(); ++i) passes_.deliver(kOutside, i, input_.micro_batch(i));
}

void Step::run_part(bool backwards) {
  if (backwards) actions_.begin_backwards();
  const bool learns = backwards || work_.begin.kind == StepKind::kTrain;
  if (learns) exchange_.begin();
  while (actions_.any_left()) {
    take_events();
    if (const auto action = actions_.next()) {
      run(*action);
    } else if (!recompute_ahead()) {
      wait();
    }
  }
  constants_.check();
  if (!backwards) exchange_.forwards_ended();
  if (learns) exchange_.backwards_ended();
  finish_exchange();
}

void Step::finish_exchange() {
  while (!exchange_.advance()) {
    take_events();
    if (!exchange_.advance()) wait();
  }
}

void Step::run(const Action& action) {
  const TimePoint start = local_.executor().now();
  local_.event_queue->set_state(step_id().step, true, true, describe(action), start);
  record_.begin(action);
  // The table's stages are the plan's layer ranges.
  switch (action.kind) {
    case ActionKind::kForward:
      run_forward(action.stage, action.micro_batch);
      break;
    case ActionKind::kBackward:
    case ActionKind::kInputGradient:
      run_backward(action);
      break;
    case ActionKind::kWeightGradient:
      run_weight_gradient(action.stage, action.micro_batch);
      break;
  }
  actions_.ended();
  record_.add(action, start);
  watch_.progress();
}

void Step::run_forward(int range, int micro_batch) {
  LayerRangePass& pass = passes_.at(range, micro_batch);
  const bool with_loss = range == local_.last_layer_range() && work_.loss != nullptr;
  const double share = split_.share(micro_batch);
  std::optional<MicroBatchLoss> loss;
  if (with_loss) {
    loss =
        MicroBatchLoss{work_.loss, slice(work_.target, split_.first(micro_batch), split_.rows(micro_batch)),
                       share * work_.begin.gradient_scale};
  }
  record_.pass_began();
  std::map<int, Activation> activation = pass.forward(std::move(loss));
  if (with_loss) loss_ += share * pass.loss();
  for (auto& [link, load] : activation) {
    if (link != kOutside) {
      passes_.deliver(link, micro_batch, std::move(load));
    } else if (!with_loss) {
      output_.put(micro_batch, std::move(load));
    }
  }
  if (has_backwards(work_.begin.kind)) {
    passes_.check_backward(range, micro_batch);
  } else {
    end_without_backward(range, micro_batch);
  }
}

void Step::end_without_backward(int range, int micro_batch) {
  passes_.erase(range, micro_batch);
  record_.pass_ended();
  if (range != local_.last_layer_range() || work_.table != nullptr) return;
  if (local_.owns_layer_range(0)) return actions_.credit();
  local_.post_to(local_.first_worker(), Credit{step_id(), micro_batch});
}

void Step::run_backward(const Action& action) {
  const auto [kind, range, micro_batch] = action;
  if (!std::exchange(backwards_begun_, true)) hold_first_backward();
  std::map<int, std::vector<at::Tensor>> back;
  if (kind == ActionKind::kBackward) {
    back = passes_.at(range, micro_batch).backward();
    passes_.erase(range, micro_batch);
    record_.pass_ended();
    exchange_.backward_ended(range);
  } else {
    back = passes_.at(range, micro_batch).backward_inputs();
    actions_.became_ready({ActionKind::kWeightGradient, range, micro_batch});
  }
  for (auto& [link, gradients] : back) {
    if (link == kOutside) {
      input_.put_gradients(micro_batch, std::move(gradients));
    } else {
      passes_.deliver_gradients(link, micro_batch, std::move(gradients));
    }
  }
}

void Step::run_weight_gradient(int range, int micro_batch) {
  passes_.at(range, micro_batch).backward_weights();
  passes_.erase(range, micro_batch);
  record_.pass_ended();
  exchange_.backward_ended(range);
}

/// See StepOptions::before_first_backward.
void Step::hold_first_backward() {
  const Future<void>& go = work_.before_first_backward;
  if (!go.valid() || !local_.owns_layer_range(0)) return;
  while (!go.done()) {
    take_events();
    try {
      go.wait(watch_.patience());
    } catch (const Error& error) {
      if (!go.done() && error.kind() == ErrorKind::kTimedOut) continue;
      throw;
    }
  }
  go.wait();
}

/// Repeats the forward of the next backward while nothing else can run. Returns false if there is none.
bool Step::recompute_ahead() {
  const auto next = actions_.next_backward();
  if (!next) return false;
  LayerRangePass* const pass = passes_.find(next->stage, next->micro_batch);
  if (pass == nullptr || !pass->can_recompute()) return false;
  local_.event_queue->set_state(step_id().step, true, true, "the repeated forward before " + describe(*next),
                                local_.executor().now());
  pass->recompute();
  return true;
}

void Step::wait() {
  const Future<void> arrival = local_.event_queue->arrival();
  if (arrival.done()) return;
  local_.event_queue->set_state(step_id().step, true, false, "", local_.executor().now());
  const char* const missing = exchange_.waiting_for();
  const std::string waiting_for = actions_.any_left()  ? passes_.waiting_for()
                                  : missing == nullptr ? "the other workers to end their parts"
                                                       : missing;
  record_.begin_wait(waiting_for);
  try {
    arrival.wait(watch_.patience());
    record_.end_wait();
  } catch (const Error& error) {
    if (arrival.done() || error.kind() != ErrorKind::kTimedOut) throw;
    if (const auto stall = watch_.look(step_id().step, waiting_for)) throw *stall;
  }
}

void Step::take_events() {
  std::deque<StepEvent> events = local_.event_queue->take(step_id().step);
  while (!events.empty()) {
    StepEvent event = std::move(events.front());
    events.pop_front();
    throw_failure(local_, step_id().step, event);
    watch_.progress();
    std::visit(
        [&](auto& held) {
          using T = std::remove_cvref_t<decltype(held)>;
          if constexpr (std::is_same_v<T, Credit>) {
            actions_.credit();
          } else if constexpr (std::is_same_v<T, PartDone> || std::is_same_v<T, ReplicaDone>) {
            closing_.add(held);
          } else if constexpr (std::is_same_v<T, StepClosed>) {
            closing_.set(std::move(held));
          } else if constexpr (requires { exchange_.accept(held); }) {
            exchange_.accept(held);
          } else if constexpr (requires { passes_.accept(held); }) {
            passes_.accept(held);
          }
        },
        event);
    // Events after the end of a part belong to the next part.
    if (std::holds_alternative<StepClosed>(event)) return local_.event_queue->put_back(std::move(events));
  }
}

void Step::meet() {
  const PartDone mine = record_.part(loss_);
  const bool first = local_.me == local_.first_worker();
  if (first) {
    closing_.add(mine);
  } else {
    local_.post_to(local_.first_worker(), mine);
  }
  while (!closing_.complete()) {
    take_events();
    if (!closing_.complete()) wait();
  }
  if (first) local_.post_to_all(closing_.result());
  closing_.reset();
}

void Step::close() {
  // Before the other workers may leave the step: a failure here must end it on all of them.
  input_.backward();
  meet();
  loss_ = closing_.result().loss;
}

void Step::commit_cache() {
  if (work_.cache != nullptr) work_.cache->commit(std::move(cache_), work_.begin.rows);
}

void Step::put_output_gradients(const std::vector<at::Tensor>& gradients) {
  const int last = local_.last_layer_range();
  if (!local_.owns_layer_range(last)) return;
  auto by_micro_batch = output_.split(gradients);
  for (int micro_batch = 0; micro_batch < split_.micro_batches(); ++micro_batch) {
    if (!output_.wants_gradients(micro_batch)) continue;
    passes_.at(last, micro_batch)
        .put_gradients(kOutside, std::move(by_micro_batch[static_cast<std::size_t>(micro_batch)]));
    passes_.check_backward(last, micro_batch);
  }
}

std::string Step::describe(const Action& action) const {
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(action.stage)];
  constexpr const char* kNames[] = {"forward", "backward", "input gradient", "weight gradient"};
  return fmt::format("the {} of micro-batch {} through {}{}", kNames[static_cast<int>(action.kind)],
                     action.micro_batch, local_.plan.describe(range.first),
                     range.last == range.first ? "" : " and the layers after it");
}

}  // namespace torchspan::pipeline
