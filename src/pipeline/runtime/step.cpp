#include "pipeline/runtime/step.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "engine/api/grad_field_sink.h"
#include "pipeline/layers/micro_batches.h"
#include "pipeline/runtime/overlap.h"

namespace torchspan::pipeline {

using schedule::ActionKind;

namespace {

/// An optimizer would step with the gradient of each micro-batch alone, before those of ties and replicas are added.
void refuse_steps_in_backward(const LocalPipeline& local) {
  for (const LayerParameter& parameter : local.parameters) {
    if (!engine::has_gradient_use(parameter.tensor, engine::GradientUse::kSteps)) continue;
    throw_invalid(
        "parameter '{}' of layer '{}' on worker '{}' is stepped in backward by an optimizer, once for each "
        "micro-batch; destroy what step_in_backward() returned, and call step() after the pipeline's step",
        parameter.name, local.plan.layers[static_cast<std::size_t>(parameter.layer)], local.worker.name());
  }
}

/// Whether a worker reports that it does not call backward(). Layers and losses that fail do so with other kinds.
bool is_abandonment(const StepEvent& event) {
  const auto* failed = std::get_if<StepFailed>(&event);
  return failed != nullptr && failed->error.kind() == ErrorKind::kCancelled;
}

/// The micro-batches whose weight gradients are left, after each action of a worker.
void add_weight_inputs(const std::vector<schedule::ActionSpan>& spans, schedule::Timeline& measured) {
  std::vector<double> waiting;
  double now = 0, peak = 0;
  for (const schedule::ActionSpan& span : spans) {
    if (span.action.kind == schedule::ActionKind::kInputGradient) peak = std::max(peak, ++now);
    if (span.action.kind == schedule::ActionKind::kWeightGradient) --now;
    waiting.push_back(now);
  }
  measured.weight_inputs.push_back(std::move(waiting));
  measured.peak_weight_inputs.push_back(peak);
}

}  // namespace

StepClosing::StepClosing(const LocalPipeline& local, const StepBegin& begin)
    : local_(local), rows_(total_rows(begin.rows)) {
  result_.id = begin.id;
  result_.peaks.resize(local.ranks().size());
  result_.actions.resize(local.ranks().size());
}

void StepClosing::add(const PartDone& part) {
  const auto worker = static_cast<std::size_t>(part.worker);
  if (part.worker < 0 || worker >= local_.ranks().size()) return;
  ++parts_;
  if (part.worker == local_.last_worker()) result_.loss = part.loss;
  result_.peaks[worker] = part.peak;
  result_.actions[worker] = part.actions;
  if (parts_ < static_cast<int>(local_.ranks().size())) return;
  const ReplicaDone mine{result_.id, local_.grid.mine, part_, rows_, result_.loss};
  dones_[{part_, mine.replica}] = mine;
  for (int other = 0; other < local_.grid.count(); ++other) {
    if (other != local_.grid.mine) local_.post(local_.rank_in_replica(other), mine);
  }
  average_losses();
}

void StepClosing::add(const ReplicaDone& done) {
  const bool known = done.replica >= 0 && done.replica < local_.grid.count() &&
                     done.replica != local_.grid.mine && done.part >= part_ && done.part <= 1 &&
                     done.rows > 0 && local_.me == local_.first_worker();
  if (!known) {
    throw_invalid("the end of replica {} does not belong to this worker, of replica {}", done.replica,
                  local_.grid.mine);
  }
  dones_[{done.part, done.replica}] = done;
  average_losses();
}

void StepClosing::average_losses() {
  if (!complete()) return;
  double rows = 0, sum = 0;
  for (const auto& [key, done] : dones_) {
    if (key.first != part_) continue;
    rows += static_cast<double>(done.rows);
    sum += static_cast<double>(done.rows) * done.loss;
  }
  if (local_.grid.count() > 1) result_.loss = sum / rows;
}

void StepClosing::set(StepClosed result) {
  result_ = std::move(result);
  closed_ = true;
}

bool StepClosing::complete() const {
  if (local_.me != local_.first_worker()) return closed_;
  const auto ended = std::count_if(dones_.begin(), dones_.end(),
                                   [this](const auto& done) { return done.first.first == part_; });
  return parts_ >= static_cast<int>(local_.ranks().size()) && ended == local_.grid.count();
}

void StepClosing::reset() {
  ++part_;
  parts_ = 0;
  closed_ = false;
}

Step::Step(const LocalPipeline& local, StepWork work)
    : local_(local),
      work_(std::move(work)),
      policy_(make_policy(local, work_.begin, work_.table)),
      passes_(local, work_, *policy_),
      exchange_(local, work_.begin),
      closing_(local, work_.begin),
      watch_(local) {
  for (const SharedConstant& constant : local.constants)
    constant_versions_.push_back(static_cast<std::uint32_t>(constant.tensor._version()));
}

void Step::run_part(bool backwards) {
  if (backwards) policy_->begin_backwards();
  const bool learns = backwards || work_.begin.kind == StepKind::kTrain;
  if (learns) {
    refuse_steps_in_backward(local_);
    exchange_.begin();
  }
  while (policy_->any_left()) {
    take_events();
    if (const auto action = policy_->next()) {
      run(*action);
    } else if (!recompute_ahead() && !run_next_step()) {
      wait();
    }
  }
  check_constants();
  if (!backwards) exchange_.forwards_ended();
  if (learns) exchange_.backwards_ended();
  wait_until([this] { return exchange_.advance(); });
}

void Step::run_to_end(OverlappedSteps* overlap) {
  overlap_ = overlap;
  run_part(false);
  close();
}

void Step::run(const schedule::Action& action) {
  const auto [kind, range, micro_batch] = action;
  const bool back = kind == ActionKind::kBackward || kind == ActionKind::kInputGradient;
  if (back && !std::exchange(backwards_begun_, true)) hold_first_backward();
  const TimePoint start = local_.executor().now();
  local_.event_queue->set_state(work_.begin.id.step, true, true, local_.describe(action), start);
  shown_.emplace(local_.worker.runtime().spans, SpanKind::kPipeline, schedule::to_string(action),
                 SpanLink{.id = work_.begin.id.step, .part = micro_batch});
  awaited_ = {};
  if (kind == ActionKind::kForward) passes_.forward(range, micro_batch);
  if (back) passes_.backward(action);
  if (kind == ActionKind::kWeightGradient) passes_.weight_gradient(range, micro_batch);
  if (kind == ActionKind::kBackward || kind == ActionKind::kWeightGradient) exchange_.backward_ended(range);
  ran_.push_back({kind, range, micro_batch, (start - work_.begin.arrived).count(),
                  (local_.executor().now() - work_.begin.arrived).count(), passes_.live()});
  shown_.reset();
  watch_.progress();
}

/// Repeats the forward of the next backward, while nothing else can run. Returns false if there is none.
bool Step::recompute_ahead() {
  LayerRangePass* const pass = passes_.next_backward();
  if (pass == nullptr || !pass->can_recompute_early()) return false;
  local_.set_state(work_.begin.id.step, true, true,
                   "the repeated forward before " + local_.describe(*policy_->next_backward()));
  pass->recompute();
  return true;
}

void Step::run_early(const schedule::Action& action) {
  if (work_.begin.kind == StepKind::kTrain) exchange_.begin();
  run(action);
}

/// Runs an action of the next step. Returns false if there is none.
bool Step::run_next_step() {
  if (overlap_ == nullptr || !overlap_->run_next(passes_.live())) return false;
  watch_.progress();
  return true;
}

/// See StepOptions::before_first_backward.
void Step::hold_first_backward() {
  const Future<void>& go = work_.before_first_backward;
  if (!go.valid() || !local_.owns_layer_range(0)) return;
  local_.set_state(work_.begin.id.step, true, true, "the wait for StepOptions::before_first_backward");
  do {
    take_events();
  } while (!go.wait_for(watch_.patience()));
  go.wait();
}

/// Throws Error{kInvalid} if a tensor of which other workers have copies has changed in this step, or requires gradients.
void Step::check_constants() const {
  for (std::size_t i = 0; i < constant_versions_.size(); ++i) {
    const SharedConstant& constant = local_.constants[i];
    const bool changed = static_cast<std::uint32_t>(constant.tensor._version()) != constant_versions_[i];
    if (!changed && !constant.tensor.requires_grad()) continue;
    throw Error(ErrorKind::kInvalid,
                fmt::format("layers of pipeline '{}' on different workers share a tensor, which {} on worker "
                            "'{}' only: {}. Each worker has its own copy: give these stages one owner "
                            "(PipelineOptions::workers), or give each layer its own tensor",
                            local_.options.name, changed ? "a step changed" : "was made to require gradients",
                            local_.worker.name(), constant.holders))
        .with_worker(local_.worker.name());
  }
}

Awaited Step::awaited() const {
  if (policy_->any_left()) return passes_.awaited();
  const char* const missing = exchange_.waiting_for();
  return {missing == nullptr ? "wait for the other workers to end their parts" : missing};
}

/// Waits for an event. The worker's spans show one wait for the same thing as one, until an event arrives or an action runs.
void Step::wait() {
  const std::uint64_t step = work_.begin.id.step;
  local_.set_state(step, true, false, "");
  const Awaited awaited = this->awaited();
  if (!shown_ || awaited != awaited_) {
    shown_.emplace(local_.worker.runtime().spans, SpanKind::kPipeline, awaited.name,
                   SpanLink{.id = step, .part = awaited.micro_batch});
    awaited_ = awaited;
  }
  if (local_.event_queue->wait(watch_.patience())) return shown_.reset();
  const std::string waiting_for = policy_->any_left()
                                      ? passes_.waiting_for()
                                      : std::string(awaited.name.substr(std::strlen("wait for ")));
  if (const auto stall = watch_.check(step, waiting_for)) throw *stall;
}

/// Takes events until `done` returns true; runs the next step meanwhile.
template <class Done>
void Step::wait_until(const Done& done) {
  while (!done()) {
    take_events();
    if (!done() && !run_next_step()) wait();
  }
}

void Step::take_events() {
  const std::uint64_t step = work_.begin.id.step;
  std::deque<StepEvent> events = local_.event_queue->take(step, overlap_ == nullptr ? step : step + 1);
  while (!events.empty()) {
    StepEvent event = std::move(events.front());
    events.pop_front();
    if (step_of(event) == step + 1) {
      overlap_->accept_next(event);
      continue;
    }
    accept(event);
    // Events after the end of a part belong to the next part.
    if (std::holds_alternative<StepClosed>(event)) return local_.event_queue->put_back(std::move(events));
  }
}

void Step::accept(StepEvent& event) {
  const bool postponed = abandonments_ && is_abandonment(event);
  if (!postponed) local_.throw_failure(work_.begin.id.step, event);
  watch_.progress();
  if (postponed) return abandonments_->push_back(std::move(event));
  std::visit(
      [&](auto& held) {
        using T = std::remove_cvref_t<decltype(held)>;
        if constexpr (std::is_same_v<T, Credit>) {
          policy_->credit();
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
}

void Step::await_workers() {
  // A worker that has left this part may begin another step before this worker has the messages that end the part.
  if (work_.begin.kind == StepKind::kForward && closing_.part() == 0) abandonments_.emplace();
  const PartDone mine{work_.begin.id, local_.me, passes_.output().loss(), passes_.peak(), ran_};
  const bool first = local_.me == local_.first_worker();
  if (first) {
    closing_.add(mine);
  } else {
    local_.post(local_.rank_of(local_.first_worker()), mine);
  }
  wait_until([this] { return closing_.complete(); });
  if (first) local_.post_to_all(local_.ranks(), closing_.result());
  closing_.reset();
  if (abandonments_) local_.event_queue->put_back(*std::exchange(abandonments_, std::nullopt));
}

void Step::close() {
  // Before the other workers may leave the step: a failure here must end it on all of them.
  if (passes_.input().has_gradients()) backward_before_input();
  await_workers();
  exchange_.commit();
  loss_ = closing_.result().loss;
}

void Step::backward_before_input() {
  const std::uint64_t step = work_.begin.id.step;
  local_.set_state(step, true, true, "the backward of the graph before the input");
  try {
    passes_.input().backward();
  } catch (...) {
    const ExceptionDescription description = describe(std::current_exception());
    const std::string where = fmt::format("the graph before the input of pipeline '{}'", local_.options.name);
    throw Error(
        ErrorKind::kRemoteFailure,
        fmt::format("step {} of pipeline '{}' failed in the backward of the graph before its input, on "
                    "worker '{}': {}",
                    step, local_.options.name, local_.worker.name(), description.text))
        .with_worker(local_.worker.name())
        .with_frame({local_.worker.name(), where, description.type, description.text});
  }
}

void Step::commit_cache() {
  if (work_.cache != nullptr) work_.cache->commit(passes_.take_cache(), work_.begin.rows);
}

void Step::put_output_gradients(const std::vector<at::Tensor>& gradients) {
  if (local_.owns_layer_range(local_.last_layer_range())) passes_.put_output_gradients(gradients);
}

StepReport Step::report() const {
  const StepClosed& result = closing_.result();
  StepReport report;
  report.step = result.id.step;
  report.micro_batches = static_cast<int>(work_.begin.rows.size());
  if (work_.table != nullptr) report.table = *work_.table;
  schedule::Timeline& measured = report.measured;
  measured.name = "measured";
  for (std::size_t worker = 0; worker < result.actions.size(); ++worker) {
    std::vector<schedule::ActionSpan> spans;
    std::vector<double> live;
    Duration busy{0};
    for (const RanAction& ran : result.actions[worker]) {
      spans.push_back({{ran.kind, ran.layer_range, ran.micro_batch}, Duration(ran.start), Duration(ran.end)});
      live.push_back(ran.live);
      busy += Duration(ran.end - ran.start);
      measured.makespan = std::max(measured.makespan, Duration(ran.end));
    }
    add_weight_inputs(spans, measured);
    measured.spans.push_back(std::move(spans));
    measured.live.push_back(std::move(live));
    measured.peak_live.push_back(result.peaks[worker]);
    measured.idle.push_back(busy);  // completed below, when the makespan is known
  }
  for (Duration& idle : measured.idle) idle = measured.makespan - idle;
  return report;
}

}  // namespace torchspan::pipeline
