#include "pipeline/runtime/action_runner.h"

#include <fmt/format.h>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace torchspan::pipeline {

using schedule::Action;
using schedule::ActionKind;

void ActionRunner::run(const Action& action) {
  const TimePoint start = local_.executor().now();
  local_.event_queue->set_state(state_.work.begin.id.step, true, true, describe(action), start);
  state_.record.begin(action);
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
  state_.record.add(action, start);
}

void ActionRunner::run_forward(int range, int micro_batch) {
  LayerRangePass& pass = state_.passes.at(range, micro_batch);
  const bool with_loss = range == local_.last_layer_range() && state_.work.loss != nullptr;
  const double share = state_.split.share(micro_batch);
  std::optional<MicroBatchLoss> loss;
  if (with_loss) {
    loss = MicroBatchLoss{
        state_.work.loss,
        slice(state_.work.target, state_.split.first(micro_batch), state_.split.rows(micro_batch)),
        share * state_.work.begin.gradient_scale};
  }
  state_.record.pass_began();
  std::map<int, Activation> activation = pass.forward(std::move(loss));
  if (with_loss) state_.own_loss.add(share, pass.take_loss());
  for (auto& [link, load] : activation) {
    if (link != kOutside) {
      state_.passes.deliver(link, micro_batch, std::move(load));
    } else if (!with_loss) {
      state_.output.put(micro_batch, std::move(load));
    }
  }
  if (has_backwards(state_.work.begin.kind)) {
    state_.passes.check_backward(range, micro_batch);
  } else {
    end_without_backward(range, micro_batch);
  }
}

void ActionRunner::end_without_backward(int range, int micro_batch) {
  state_.passes.erase(range, micro_batch);
  state_.record.pass_ended();
  if (range != local_.last_layer_range() || state_.work.table != nullptr) return;
  if (local_.owns_layer_range(0)) return state_.policy->credit();
  local_.post_to(local_.first_worker(), Credit{state_.work.begin.id, micro_batch});
}

void ActionRunner::run_backward(const Action& action) {
  const auto [kind, range, micro_batch] = action;
  prefetch_next();
  std::map<int, std::vector<at::Tensor>> back;
  if (kind == ActionKind::kBackward) {
    back = state_.passes.at(range, micro_batch).backward();
    state_.passes.erase(range, micro_batch);
    state_.record.pass_ended();
    state_.exchange.backward_ended(range);
  } else {
    back = state_.passes.at(range, micro_batch).backward_inputs();
    state_.policy->became_ready({ActionKind::kWeightGradient, range, micro_batch});
  }
  for (auto& [link, gradients] : back) {
    if (link == kOutside) {
      state_.input.put_gradients(micro_batch, std::move(gradients));
    } else {
      state_.passes.deliver_gradients(link, micro_batch, std::move(gradients));
    }
  }
}

/// Brings the inputs of the next backward to the device while this one runs.
void ActionRunner::prefetch_next() {
  if (state_.work.offloader == nullptr) return;
  const auto next = state_.policy->next_backward();
  if (!next) return;
  if (LayerRangePass* const pass = state_.passes.find(next->stage, next->micro_batch)) pass->prefetch();
}

void ActionRunner::run_weight_gradient(int range, int micro_batch) {
  state_.passes.at(range, micro_batch).backward_weights();
  state_.passes.erase(range, micro_batch);
  state_.record.pass_ended();
  state_.exchange.backward_ended(range);
}

bool ActionRunner::recompute_ahead() {
  const auto next = state_.policy->next_backward();
  if (!next) return false;
  LayerRangePass* const pass = state_.passes.find(next->stage, next->micro_batch);
  if (pass == nullptr || !pass->can_recompute_early()) return false;
  local_.event_queue->set_state(state_.work.begin.id.step, true, true,
                                "the repeated forward before " + describe(*next), local_.executor().now());
  pass->recompute();
  return true;
}

std::string ActionRunner::describe(const Action& action) const {
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(action.stage)];
  constexpr const char* kNames[] = {"forward", "backward", "input gradient", "weight gradient"};
  return fmt::format("the {} of micro-batch {} through {}{}", kNames[static_cast<int>(action.kind)],
                     action.micro_batch, local_.plan.describe(range.first),
                     range.last == range.first ? "" : " and the layers after it");
}

}  // namespace torchspan::pipeline
