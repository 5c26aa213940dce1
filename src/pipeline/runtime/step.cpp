#include "pipeline/runtime/step.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "pipeline/layers/micro_batches.h"
#include "pipeline/runtime/step_failures.h"

namespace torchspan::pipeline {

using schedule::Action;
using schedule::ActionKind;

Step::Step(const LocalPipeline& local, StepWork work)
    : local_(local), work_(std::move(work)), start_(work_.begin.arrived), watch_(local), constants_(local) {
  std::int64_t first = 0;
  for (const std::int64_t rows : work_.begin.rows) {
    first_row_.push_back(first);
    first += rows;
  }
  first_row_.push_back(first);
  outputs_.resize(work_.begin.rows.size());
  output_rows_.resize(work_.begin.rows.size());
  output_wants_.resize(work_.begin.rows.size());
  closing_.id = step_id();
  closing_.peaks.resize(local.ranks.size());
  closing_.actions.resize(local.ranks.size());
  backwards_allowed_ = work_.begin.kind == StepKind::kTrain;
  policy_ = make_policy(false);
  actions_left_ = count_actions(false);
  feed_input();
}

std::unique_ptr<Policy> Step::make_policy(bool backwards) const {
  if (work_.table == nullptr) {
    ArrivalLimits limits;
    if (local_.owns_layer_range(0) && work_.begin.kind != StepKind::kForward) {
      const int asked = local_.options.max_in_flight;
      limits = {0, asked > 0 ? asked : 2 * static_cast<int>(local_.ranks.size()), trains()};
    }
    return make_arrival_policy(limits);
  }
  std::vector<Action> row = work_.table->actions[static_cast<std::size_t>(local_.me)];
  if (work_.begin.kind == StepKind::kForward) {
    std::erase_if(row,
                  [&](const Action& action) { return (action.kind != ActionKind::kForward) != backwards; });
  }
  return make_table_policy(std::move(row));
}

int Step::count_actions(bool backwards) const {
  int ranges = 0;
  for (int range = 0; range <= local_.last_layer_range(); ++range)
    ranges += local_.owns_layer_range(range) ? 1 : 0;
  const int parts = work_.begin.kind == StepKind::kTrain && !backwards ? 2 : 1;
  return ranges * micro_batches() * parts;
}

void Step::feed_input() {
  if (!local_.owns_layer_range(0)) return;
  for (int i = 0; i < micro_batches(); ++i) {
    Activation activation;
    activation.batch = slice(work_.input, first_row_[static_cast<std::size_t>(i)],
                             work_.begin.rows[static_cast<std::size_t>(i)]);
    for (const c10::IValue& member : activation.batch.members) {
      activation.wants_gradient.push_back(
          trains() && member.isTensor() && member.toTensor().requires_grad() ? 1 : 0);
    }
    deliver(kOutside, i, std::move(activation));
  }
}

LayerRangePass& Step::pass(int range, int micro_batch) {
  auto& slot = passes_[{range, micro_batch}];
  if (!slot) {
    const ActivationCheckpoint checkpoint = local_.options.checkpoint;
    const bool last = micro_batch == micro_batches() - 1;
    const bool recompute = trains() && (checkpoint == ActivationCheckpoint::kAlways ||
                                        (checkpoint == ActivationCheckpoint::kExceptLast && !last));
    slot = std::make_unique<LayerRangePass>(local_, range, micro_batch,
                                            RunMode{step_id().step, trains(), recompute});
  }
  return *slot;
}

void Step::tell_policy(const Action& action) {
  if (action.kind == ActionKind::kForward || backwards_allowed_) {
    policy_->became_ready(action);
  } else {
    ready_early_.push_back(action);
  }
}

void Step::check_forward(int range, int micro_batch) {
  if (pass(range, micro_batch).has_inputs()) tell_policy({ActionKind::kForward, range, micro_batch});
}

void Step::check_backward(int range, int micro_batch) {
  if (trains() && pass(range, micro_batch).has_gradients())
    tell_policy({ActionKind::kBackward, range, micro_batch});
}

void Step::deliver(int link, int micro_batch, Activation activation) {
  const int to = link == kOutside ? 0 : local_.plan.links[static_cast<std::size_t>(link)].to;
  if (local_.owns_layer_range(to)) {
    pass(to, micro_batch).put_input(link, std::move(activation));
    return check_forward(to, micro_batch);
  }
  Activations message;
  message.id = step_id();
  message.micro_batch = micro_batch;
  message.link = link;
  message.tuple = activation.batch.tuple;
  message.members = std::move(activation.batch.members);
  message.wants_gradient = std::move(activation.wants_gradient);
  message.unsplit = std::move(activation.batch.unsplit);
  local_.post_to(local_.plan.layer_ranges[static_cast<std::size_t>(to)].worker, message);
}

void Step::deliver_gradients(int link, int micro_batch, std::vector<at::Tensor> gradients) {
  if (link == kOutside) {
    input_gradients_[micro_batch] = std::move(gradients);
    return;
  }
  const int from = local_.plan.links[static_cast<std::size_t>(link)].from;
  if (local_.owns_layer_range(from)) {
    pass(from, micro_batch).put_gradients(link, std::move(gradients));
    return check_backward(from, micro_batch);
  }
  local_.post_to(local_.plan.layer_ranges[static_cast<std::size_t>(from)].worker,
                 Gradients{step_id(), micro_batch, link, std::move(gradients)});
}

void Step::run_forward(int range, int micro_batch) {
  LayerRangePass& here = pass(range, micro_batch);
  const auto i = static_cast<std::size_t>(micro_batch);
  const bool last = range == local_.last_layer_range();
  std::optional<MicroBatchLoss> loss;
  const double share = static_cast<double>(work_.begin.rows[i]) / static_cast<double>(first_row_.back());
  if (last && work_.loss != nullptr) {
    loss = MicroBatchLoss{work_.loss, slice(work_.target, first_row_[i], work_.begin.rows[i]),
                          share * work_.begin.gradient_scale};
  }
  peak_ = std::max(peak_, ++live_);
  std::map<int, Activation> activation = here.forward(std::move(loss));
  if (last && work_.loss != nullptr) loss_ += share * here.loss();
  for (auto& [link, load] : activation) {
    if (link != kOutside) {
      deliver(link, micro_batch, std::move(load));
    } else if (work_.loss == nullptr) {
      keep_output(micro_batch, std::move(load));
    }
  }
  if (trains()) return check_backward(range, micro_batch);
  passes_.erase({range, micro_batch});
  --live_;
  if (!last || work_.table != nullptr) return;
  if (local_.owns_layer_range(0)) return policy_->credit();
  local_.post_to(local_.first_worker(), Credit{step_id(), micro_batch});
}

void Step::keep_output(int micro_batch, Activation activation) {
  const auto i = static_cast<std::size_t>(micro_batch);
  const Batch& batch = activation.batch;
  for (std::size_t member = 0; member < batch.size(); ++member) {
    output_rows_[i].push_back(has_rows(batch, member) ? batch.members[member].toTensor().size(0) : -1);
  }
  output_wants_[i] = std::move(activation.wants_gradient);
  outputs_[i] = std::move(activation.batch);
}

void Step::run_backward(int range, int micro_batch) {
  if (!std::exchange(backwards_begun_, true)) hold_first_backward();
  auto back = pass(range, micro_batch).backward();
  passes_.erase({range, micro_batch});
  --live_;
  for (auto& [link, gradients] : back) deliver_gradients(link, micro_batch, std::move(gradients));
}

/// One controller may want to see all forwards done before any gradient moves.
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

void Step::run(const Action& action) {
  const TimePoint start = local_.executor().now();
  local_.event_queue->set_state(step_id().step, true, true, describe(action), start);
  if (action.kind == ActionKind::kForward) {
    run_forward(action.stage, action.micro_batch);
  } else {
    run_backward(action.stage, action.micro_batch);
  }
  --actions_left_;
  record(action, start);
  watch_.progress();
}

void Step::record(const Action& action, TimePoint start) {
  const TimePoint end = local_.executor().now();
  ran_.push_back({action.kind, action.stage, action.micro_batch, (start - start_).count(),
                  (end - start_).count(), live_});
  local_.worker.runtime().spans.record(SpanKind::kPipeline, schedule::to_string(action), start,
                                       step_id().step);
}

bool Step::recompute_ahead() {
  if (!backwards_allowed_) return false;
  const auto next = policy_->next_backward();
  if (!next || next->kind != ActionKind::kBackward) return false;
  const auto found = passes_.find({next->stage, next->micro_batch});
  if (found == passes_.end() || !found->second->can_recompute()) return false;
  local_.event_queue->set_state(step_id().step, true, true, "the repeated forward before " + describe(*next),
                                local_.executor().now());
  found->second->recompute();
  return true;
}

void Step::run_part(bool backwards) {
  if (backwards) {
    backwards_allowed_ = true;
    policy_ = make_policy(true);
    actions_left_ = count_actions(true);
    for (const Action& action : std::exchange(ready_early_, {})) policy_->became_ready(action);
  }
  while (actions_left_ > 0) {
    take_events();
    if (const auto action = policy_->next()) {
      run(*action);
    } else if (!recompute_ahead()) {
      wait();
    }
  }
  constants_.check();
}

void Step::wait() {
  const Future<void> arrival = local_.event_queue->arrival();
  if (arrival.done()) return;
  local_.event_queue->set_state(step_id().step, true, false, "", local_.executor().now());
  try {
    arrival.wait(watch_.patience());
  } catch (const Error& error) {
    if (arrival.done() || error.kind() != ErrorKind::kTimedOut) throw;
    if (const auto stall = watch_.look(step_id().step, waiting_for())) throw *stall;
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
            policy_->credit();
          } else if constexpr (requires { accept(held); }) {
            accept(held);
          }
        },
        event);
    // What follows the end of a part belongs to the next one.
    if (std::holds_alternative<StepClosed>(event)) return local_.event_queue->put_back(std::move(events));
  }
}

void Step::accept(Activations& event) {
  const bool known = event.link >= 0 && event.link < static_cast<int>(local_.plan.links.size()) &&
                     event.micro_batch >= 0 && event.micro_batch < micro_batches() &&
                     event.members.size() == event.wants_gradient.size() &&
                     event.unsplit.size() <= event.members.size();
  const int to = known ? local_.plan.links[static_cast<std::size_t>(event.link)].to : -1;
  if (!known || !local_.owns_layer_range(to)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("activations of link {}, micro-batch {}, do not belong to this worker",
                            event.link, event.micro_batch));
  }
  Activation activation;
  activation.batch.members = std::move(event.members);
  activation.batch.tuple = event.tuple;
  activation.wants_gradient = std::move(event.wants_gradient);
  activation.batch.unsplit = std::move(event.unsplit);
  deliver(event.link, event.micro_batch, std::move(activation));
}

void Step::accept(Gradients& event) {
  const bool known = event.link >= 0 && event.link < static_cast<int>(local_.plan.links.size()) &&
                     event.micro_batch >= 0 && event.micro_batch < micro_batches();
  const int from = known ? local_.plan.links[static_cast<std::size_t>(event.link)].from : -1;
  if (!known || !local_.owns_layer_range(from)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("gradients of link {}, micro-batch {}, do not belong to this worker", event.link,
                            event.micro_batch));
  }
  deliver_gradients(event.link, event.micro_batch, std::move(event.gradients));
}

void Step::accept(const PartDone& event) {
  const auto worker = static_cast<std::size_t>(event.worker);
  if (event.worker < 0 || worker >= local_.ranks.size()) return;
  ++parts_done_;
  if (event.worker == local_.last_worker()) closing_.loss = event.loss;
  closing_.peaks[worker] = event.peak;
  closing_.actions[worker] = event.actions;
}

void Step::accept(StepClosed& event) {
  closing_ = std::move(event);
  closed_ = true;
}

void Step::meet() {
  const PartDone mine{step_id(), local_.me, loss_, peak_, ran_};
  closed_ = false;
  if (local_.me == local_.first_worker()) {
    accept(mine);
    while (parts_done_ < static_cast<int>(local_.ranks.size())) {
      take_events();
      if (parts_done_ < static_cast<int>(local_.ranks.size())) wait();
    }
    parts_done_ = 0;
    local_.post_to_all(closing_);
  } else {
    local_.post_to(local_.first_worker(), mine);
    while (!closed_) {
      take_events();
      if (!closed_) wait();
    }
  }
}

void Step::close() {
  // Before the others are free to go: what fails here fails for all of them.
  finish_input_gradients();
  meet();
  loss_ = closing_.loss;
}

void Step::finish_input_gradients() {
  if (input_gradients_.empty()) return;
  torch::autograd::edge_list roots;
  torch::autograd::variable_list gradients;
  for (std::size_t member = 0; member < work_.input.members.size(); ++member) {
    const c10::IValue& value = work_.input.members[member];
    if (!value.isTensor() || !value.toTensor().requires_grad()) continue;
    const at::Tensor whole = value.toTensor().detach();
    const bool split = has_rows(work_.input, member);  // one without rows went to all micro-batches
    std::vector<at::Tensor> pieces;
    for (int i = 0; i < micro_batches(); ++i) {
      const auto found = input_gradients_.find(i);
      const at::Tensor piece = found == input_gradients_.end() ? at::Tensor() : found->second.at(member);
      const auto rows = static_cast<std::size_t>(i);
      const at::Tensor like = split ? whole.narrow(0, first_row_[rows], work_.begin.rows[rows]) : whole;
      pieces.push_back(piece.defined() ? piece : at::zeros_like(like));
    }
    roots.push_back(torch::autograd::impl::gradient_edge(value.toTensor()));
    gradients.push_back(split ? at::cat(pieces) : at::stack(pieces).sum(0));
  }
  local_.event_queue->set_state(step_id().step, true, true, "the backward of the graph before the input",
                                local_.executor().now());
  try {
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, false, false, true);
  } catch (...) {
    const ExceptionStory story = torchspan::describe(std::current_exception());
    const std::string where = fmt::format("the graph before the input of pipeline '{}'", local_.options.name);
    throw Error(
        ErrorKind::kRemoteFailure,
        fmt::format("step {} of pipeline '{}' failed in the backward of the graph before its input, on "
                    "worker '{}': {}",
                    step_id().step, local_.options.name, local_.worker.name(), story.text))
        .with_worker(local_.worker.name())
        .with_frame({local_.worker.name(), where, story.type, story.text});
  }
}

Batch Step::output() {
  Batch whole = join(outputs_);
  outputs_.clear();
  for (const auto& wants : output_wants_) {
    for (std::size_t member = 0; member < wants.size(); ++member) {
      if (wants[member] != 0) whole.members[member].toTensor().set_requires_grad(true);
    }
  }
  return whole;
}

void Step::put_output_gradients(const std::vector<at::Tensor>& gradients) {
  if (!local_.owns_layer_range(local_.last_layer_range())) return;
  std::vector<std::int64_t> first(gradients.size(), 0);
  for (int micro_batch = 0; micro_batch < micro_batches(); ++micro_batch) {
    const auto i = static_cast<std::size_t>(micro_batch);
    std::vector<at::Tensor> pieces;
    for (std::size_t member = 0; member < gradients.size(); ++member) {
      const std::int64_t rows = output_rows_[i].at(member);
      const at::Tensor& whole = gradients[member];
      // Outputs without rows were stacked, unless there was only one.
      const bool stacked = rows < 0 && micro_batches() > 1;
      pieces.push_back(!whole.defined() ? whole
                       : rows >= 0      ? whole.narrow(0, first[member], rows)
                       : stacked        ? whole.select(0, micro_batch)
                                        : whole);
      first[member] += std::max<std::int64_t>(rows, 0);
    }
    const auto& wants = output_wants_[i];
    if (std::find(wants.begin(), wants.end(), 1) == wants.end()) continue;
    pass(local_.last_layer_range(), micro_batch).put_gradients(kOutside, std::move(pieces));
    check_backward(local_.last_layer_range(), micro_batch);
  }
}

std::string Step::describe(const Action& action) const {
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(action.stage)];
  return fmt::format("the {} of micro-batch {} through {}{}",
                     action.kind == ActionKind::kForward ? "forward" : "backward", action.micro_batch,
                     local_.plan.describe(range.first), range.last == range.first ? "" : " and on");
}

std::string Step::waiting_for() const {
  if (actions_left_ == 0) return "the others to end their parts";
  if (passes_.empty()) return "activations";
  const auto& [key, oldest] = *passes_.begin();
  return fmt::format(
      "{} of micro-batch {} at {}", oldest->forward_done() ? "gradients" : "activations", key.second,
      local_.plan.describe(local_.plan.layer_ranges[static_cast<std::size_t>(key.first)].first));
}

StepReport Step::report() const {
  StepReport report;
  report.step = step_id().step;
  report.micro_batches = micro_batches();
  if (work_.table != nullptr) report.table = *work_.table;
  schedule::Timeline& measured = report.measured;
  measured.name = "measured";
  for (std::size_t worker = 0; worker < closing_.actions.size(); ++worker) {
    std::vector<schedule::ActionSpan> spans;
    std::vector<double> live;
    Duration busy{0};
    for (const RanAction& ran : closing_.actions[worker]) {
      spans.push_back({{ran.kind, ran.layer_range, ran.micro_batch}, Duration(ran.start), Duration(ran.end)});
      live.push_back(ran.live);
      busy += Duration(ran.end - ran.start);
      measured.makespan = std::max(measured.makespan, Duration(ran.end));
    }
    measured.spans.push_back(std::move(spans));
    measured.live.push_back(std::move(live));
    measured.peak_live.push_back(closing_.peaks[worker]);
    measured.idle.push_back(busy);  // completed below, when the makespan is known
  }
  for (Duration& idle : measured.idle) idle = measured.makespan - idle;
  return report;
}

}  // namespace torchspan::pipeline
