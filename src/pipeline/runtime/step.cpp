#include "pipeline/runtime/step.h"

#include <cstring>
#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

#include "engine/api/grad_field_sink.h"
#include "pipeline/runtime/step_failures.h"

namespace torchspan::pipeline {
namespace {

/// An optimizer would step with the gradient of each micro-batch alone, before those of ties and replicas are added.
void refuse_steps_in_backward(const LocalPipeline& local) {
  for (const LayerParameter& parameter : local.parameters) {
    if (!engine::has_gradient_use(parameter.tensor, engine::GradientUse::kSteps)) continue;
    throw_invalid(fmt::format(
        "parameter '{}' of layer '{}' on worker '{}' is stepped in backward by an optimizer, once for each "
        "micro-batch; destroy what step_in_backward() returned, and call step() after the pipeline's step",
        parameter.name, local.plan.layers[static_cast<std::size_t>(parameter.layer)], local.worker.name()));
  }
}

/// Whether a worker reports that it does not call backward(). Layers and losses that fail do so with other kinds.
bool is_abandonment(const StepEvent& event) {
  const auto* failed = std::get_if<StepFailed>(&event);
  return failed != nullptr && failed->error.kind() == ErrorKind::kCancelled;
}

}  // namespace

Step::Step(const LocalPipeline& local, StepWork work)
    : local_(local),
      state_(local, std::move(work)),
      runner_(local, state_),
      watch_(local),
      constants_(local),
      closing_(local, state_.work.begin) {
  if (!local_.owns_layer_range(0)) return;
  for (int i = 0; i < state_.split.micro_batches(); ++i)
    state_.passes.deliver(kOutside, i, state_.input.micro_batch(i));
}

void Step::run_part(bool backwards) {
  if (backwards) state_.policy->begin_backwards();
  const bool learns = backwards || state_.work.begin.kind == StepKind::kTrain;
  if (learns) {
    refuse_steps_in_backward(local_);
    state_.exchange.begin();
  }
  while (state_.policy->any_left()) {
    take_events();
    if (const auto action = state_.policy->next()) {
      run(*action);
    } else if (!runner_.recompute_ahead() && !run_next_step()) {
      wait();
    }
  }
  constants_.check();
  if (!backwards) state_.exchange.forwards_ended();
  if (learns) state_.exchange.backwards_ended();
  finish_exchange();
}

void Step::finish_exchange() {
  while (!state_.exchange.advance()) {
    take_events();
    if (!state_.exchange.advance() && !run_next_step()) wait();
  }
}

void Step::run_to_end(NextStep* next) {
  next_ = next;
  run_part(false);
  close();
}

void Step::run(const schedule::Action& action) {
  const bool back =
      action.kind == schedule::ActionKind::kBackward || action.kind == schedule::ActionKind::kInputGradient;
  if (back && !std::exchange(backwards_begun_, true)) hold_first_backward();
  runner_.run(action);
  watch_.progress();
}

void Step::run_early(const schedule::Action& action) {
  if (state_.work.begin.kind == StepKind::kTrain) state_.exchange.begin();
  run(action);
}

/// Runs an action of the next step. Returns false if there is none.
bool Step::run_next_step() {
  if (next_ == nullptr || !next_->run_one(state_.record.live())) return false;
  watch_.progress();
  return true;
}

/// See StepOptions::before_first_backward.
void Step::hold_first_backward() {
  const Future<void>& go = state_.work.before_first_backward;
  if (!go.valid() || !local_.owns_layer_range(0)) return;
  local_.event_queue->set_state(state_.work.begin.id.step, true, true,
                                "the wait for StepOptions::before_first_backward", local_.executor().now());
  do {
    take_events();
  } while (!go.wait_for(watch_.patience()));
  go.wait();
}

Awaited Step::awaited() const {
  if (state_.policy->any_left()) return state_.passes.awaited();
  const char* const missing = state_.exchange.waiting_for();
  return {missing == nullptr ? "wait for the other workers to end their parts" : missing};
}

void Step::wait() {
  local_.event_queue->set_state(state_.work.begin.id.step, true, false, "", local_.executor().now());
  const Awaited awaited = this->awaited();
  state_.record.begin_wait(awaited);
  if (local_.event_queue->wait(watch_.patience())) return state_.record.end_wait();
  const std::string waiting_for = state_.policy->any_left()
                                      ? state_.passes.waiting_for()
                                      : std::string(awaited.name.substr(std::strlen("wait for ")));
  if (const auto stall = watch_.look(state_.work.begin.id.step, waiting_for)) throw *stall;
}

void Step::take_events() {
  const std::uint64_t step = state_.work.begin.id.step;
  std::deque<StepEvent> events = local_.event_queue->take(step, next_ == nullptr ? step : step + 1);
  while (!events.empty()) {
    StepEvent event = std::move(events.front());
    events.pop_front();
    if (step_of(event) == step + 1) {
      next_->accept(event);
      continue;
    }
    accept(event);
    // Events after the end of a part belong to the next part.
    if (std::holds_alternative<StepClosed>(event)) return local_.event_queue->put_back(std::move(events));
  }
}

void Step::accept(StepEvent& event) {
  const bool postponed = abandonments_ && is_abandonment(event);
  if (!postponed) throw_failure(local_, state_.work.begin.id.step, event);
  watch_.progress();
  if (postponed) return abandonments_->push_back(std::move(event));
  std::visit(
      [&](auto& held) {
        using T = std::remove_cvref_t<decltype(held)>;
        if constexpr (std::is_same_v<T, Credit>) {
          state_.policy->credit();
        } else if constexpr (std::is_same_v<T, PartDone> || std::is_same_v<T, ReplicaDone>) {
          closing_.add(held);
        } else if constexpr (std::is_same_v<T, StepClosed>) {
          closing_.set(std::move(held));
        } else if constexpr (requires { state_.exchange.accept(held); }) {
          state_.exchange.accept(held);
        } else if constexpr (requires { state_.passes.accept(held); }) {
          state_.passes.accept(held);
        }
      },
      event);
}

void Step::meet() {
  // A worker that has left this part may begin another step before this worker has the messages that end the part.
  if (state_.work.begin.kind == StepKind::kForward && closing_.part() == 0) abandonments_.emplace();
  const PartDone mine = state_.record.part(state_.own_loss.read());
  const bool first = local_.me == local_.first_worker();
  if (first) {
    closing_.add(mine);
  } else {
    local_.post_to(local_.first_worker(), mine);
  }
  while (!closing_.complete()) {
    take_events();
    if (!closing_.complete() && !run_next_step()) wait();
  }
  if (first) local_.post_to_all(closing_.result());
  closing_.reset();
  if (abandonments_) local_.event_queue->put_back(*std::exchange(abandonments_, std::nullopt));
}

void Step::close() {
  // Before the other workers may leave the step: a failure here must end it on all of them.
  state_.input.backward();
  meet();
  state_.exchange.commit();
  state_.loss = closing_.result().loss;
}

void Step::commit_cache() {
  if (state_.work.cache != nullptr)
    state_.work.cache->commit(std::move(state_.cache), state_.work.begin.rows);
}

void Step::put_output_gradients(const std::vector<at::Tensor>& gradients) {
  const int last = local_.last_layer_range();
  if (!local_.owns_layer_range(last)) return;
  auto by_micro_batch = state_.output.split(gradients);
  for (int micro_batch = 0; micro_batch < state_.split.micro_batches(); ++micro_batch) {
    if (!state_.output.wants_gradients(micro_batch)) continue;
    state_.passes.at(last, micro_batch)
        .put_gradients(kOutside, std::move(by_micro_batch[static_cast<std::size_t>(micro_batch)]));
    state_.passes.check_backward(last, micro_batch);
  }
}

}  // namespace torchspan::pipeline
