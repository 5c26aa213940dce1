#include "pipeline/runtime/passes.h"

#include <fmt/format.h>
#include <optional>

#include "core/api/throw_invalid.h"
#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {

using schedule::ActionKind;

namespace {

/// See RunMode::unordered.
const char* why_unordered(const LocalPipeline& local, StepKind kind) {
  if (local.grid.all_ranks().size() == 1) return nullptr;
  if (local.options.schedule == Schedule::kArrival) {
    return "Schedule::kArrival runs actions in the order in which messages arrive; use another schedule for "
           "layers "
           "that communicate";
  }
  if (local.options.staleness > 0 && (kind == StepKind::kTrain || kind == StepKind::kLoss)) {
    return "with PipelineOptions::staleness 1, actions of the next step run when this one waits; use "
           "staleness 0 for "
           "layers that communicate";
  }
  return nullptr;
}

}  // namespace

Passes::Passes(const LocalPipeline& local, StepWork& work, Policy& policy)
    : local_(local),
      work_(work),
      policy_(policy),
      cache_(work.cache != nullptr ? work.cache->tensors() : CacheTensors()),
      mode_{.step = work.begin.id.step,
            .gradients = has_backwards(work.begin.kind),
            .cache = work.cache != nullptr ? &cache_ : nullptr,
            .random_step = work.begin.random_step,
            .offloader = work.offloader,
            .unordered = why_unordered(local, work.begin.kind)},
      input_(work.begin, std::move(work.input)),
      output_(static_cast<int>(work.begin.rows.size())) {
  if (!local.owns_layer_range(0)) return;
  for (int i = 0; i < static_cast<int>(work.begin.rows.size()); ++i) {
    at(0, i).put_input(kOutside, input_.micro_batch(i));
    policy.became_ready({ActionKind::kForward, 0, i});
  }
}

/// The pass of a micro-batch through a layer range of this worker; created at its first use.
LayerRangePass& Passes::at(int range, int micro_batch) {
  auto& slot = passes_[{range, micro_batch}];
  if (!slot) {
    const ActivationCheckpoint checkpoint = local_.options.checkpoint;
    const bool last = micro_batch == static_cast<int>(work_.begin.rows.size()) - 1;
    RunMode mode = mode_;
    mode.recompute = mode_.gradients && (checkpoint == ActivationCheckpoint::kAlways ||
                                         (checkpoint == ActivationCheckpoint::kExceptLast && !last));
    slot = std::make_unique<LayerRangePass>(local_, range, micro_batch, mode);
  }
  return *slot;
}

/// Reports the backward of a pass if it is ready.
void Passes::check_backward(int range, int micro_batch) {
  if (mode_.gradients && at(range, micro_batch).has_gradients())
    policy_.became_ready({ActionKind::kBackward, range, micro_batch});
}

void Passes::end_pass(int range, int micro_batch) {
  passes_.erase({range, micro_batch});
  --live_;
}

void Passes::forward(int range, int micro_batch) {
  const StepBegin& begin = work_.begin;
  LayerRangePass& pass = at(range, micro_batch);
  const bool last = range == local_.last_layer_range();
  const bool with_loss = last && work_.loss != nullptr;
  const std::int64_t rows = begin.rows[static_cast<std::size_t>(micro_batch)];
  const double share = static_cast<double>(rows) / static_cast<double>(total_rows(begin.rows));
  std::optional<MicroBatchLoss> loss;
  if (with_loss) {
    loss = MicroBatchLoss{work_.loss, slice(work_.target, rows_before(begin.rows, micro_batch), rows),
                          share * begin.gradient_scale};
  }
  peak_ = std::max(peak_, ++live_);
  std::map<int, Activation> outputs = pass.forward(std::move(loss));
  if (with_loss) output_.add_loss(share, pass.take_loss());
  for (auto& [link, output] : outputs) {
    if (link == kOutside) {
      if (!with_loss) output_.put(micro_batch, std::move(output));
      continue;
    }
    Activations message{std::move(output), begin.id, micro_batch, link, {}};
    const int to = local_.plan.links[static_cast<std::size_t>(link)].to;
    if (local_.owns_layer_range(to)) {
      accept(message);
      continue;
    }
    const std::uint32_t rank = local_.rank_of(worker_of(to));
    // A receiver copies what is sent to its device when it arrives. Inputs of micro-batches whose forward has not begun
    // would take the memory that offload saves; in a step without backwards, nothing limits their number.
    if (!local_.options.offload && mode_.gradients) message.place = local_.grid.devices.of_range(rank, to);
    local_.post(rank, message);
  }
  if (mode_.gradients) return check_backward(range, micro_batch);
  end_pass(range, micro_batch);
  if (!last || work_.table != nullptr) return;
  if (local_.owns_layer_range(0)) return policy_.credit();
  local_.post(local_.rank_of(local_.first_worker()), Credit{begin.id, micro_batch});
}

void Passes::backward(const schedule::Action& action) {
  const auto [kind, range, micro_batch] = action;
  // Brings the inputs of the next backward to the device while this one runs.
  if (LayerRangePass* const next = work_.offloader == nullptr ? nullptr : next_backward()) next->prefetch();
  LayerRangePass& pass = at(range, micro_batch);
  std::map<int, std::vector<at::Tensor>> back;
  if (kind == ActionKind::kBackward) {
    back = pass.backward();
    end_pass(range, micro_batch);
  } else {
    back = pass.backward_inputs();
    policy_.became_ready({ActionKind::kWeightGradient, range, micro_batch});
  }
  for (auto& [link, gradients] : back) {
    if (link == kOutside) {
      input_.put_gradients(micro_batch, std::move(gradients));
      continue;
    }
    Gradients message{work_.begin.id, micro_batch, link, std::move(gradients), {}};
    const int from = local_.plan.links[static_cast<std::size_t>(link)].from;
    if (local_.owns_layer_range(from)) {
      accept(message);
      continue;
    }
    const std::uint32_t rank = local_.rank_of(worker_of(from));
    message.place = local_.grid.devices.of_range(rank, from);
    local_.post(rank, message);
  }
}

void Passes::weight_gradient(int range, int micro_batch) {
  at(range, micro_batch).backward_weights();
  end_pass(range, micro_batch);
}

LayerRangePass* Passes::next_backward() {
  const auto next = policy_.next_backward();
  if (!next) return nullptr;
  const auto found = passes_.find({next->stage, next->micro_batch});
  return found == passes_.end() ? nullptr : found->second.get();
}

/// Null for a link or a micro-batch that does not exist.
const Link* Passes::find_link(int link, int micro_batch) const {
  const bool known = link >= 0 && link < static_cast<int>(local_.plan.links.size()) && micro_batch >= 0 &&
                     micro_batch < static_cast<int>(work_.begin.rows.size());
  return known ? &local_.plan.links[static_cast<std::size_t>(link)] : nullptr;
}

void Passes::accept(Activations& event) {
  const Link* const link = find_link(event.link, event.micro_batch);
  const bool valid = link != nullptr && local_.owns_layer_range(link->to) &&
                     event.members.size() == event.wants_gradient.size() &&
                     event.unsplit.size() <= event.members.size();
  if (!valid) {
    throw_invalid("activations of link {}, micro-batch {}, do not belong to this worker", event.link,
                  event.micro_batch);
  }
  LayerRangePass& pass = at(link->to, event.micro_batch);
  pass.put_input(event.link, static_cast<Activation&&>(event));
  if (pass.has_inputs()) policy_.became_ready({ActionKind::kForward, link->to, event.micro_batch});
}

void Passes::accept(Gradients& event) {
  const Link* const link = find_link(event.link, event.micro_batch);
  if (link == nullptr || !local_.owns_layer_range(link->from)) {
    throw_invalid("gradients of link {}, micro-batch {}, do not belong to this worker", event.link,
                  event.micro_batch);
  }
  at(link->from, event.micro_batch).put_gradients(event.link, std::move(event.gradients));
  check_backward(link->from, event.micro_batch);
}

void Passes::put_output_gradients(const std::vector<at::Tensor>& gradients) {
  const int last = local_.last_layer_range();
  auto by_micro_batch = output_.split(gradients);
  for (int micro_batch = 0; micro_batch < static_cast<int>(by_micro_batch.size()); ++micro_batch) {
    if (!output_.wants_gradients(micro_batch)) continue;
    at(last, micro_batch)
        .put_gradients(kOutside, std::move(by_micro_batch[static_cast<std::size_t>(micro_batch)]));
    check_backward(last, micro_batch);
  }
}

Awaited Passes::awaited() const {
  if (passes_.empty()) return {"wait for activations"};
  const auto& [key, oldest] = *passes_.begin();
  const auto& [activations, gradients] = local_.wait_names[static_cast<std::size_t>(key.first)];
  return {oldest->forward_done() ? gradients : activations, key.second};
}

std::string Passes::waiting_for() const {
  if (passes_.empty()) return "activations";
  const auto& [key, oldest] = *passes_.begin();
  const LayerRange& range = local_.plan.layer_ranges[static_cast<std::size_t>(key.first)];
  return fmt::format("{} of micro-batch {} at {}", oldest->forward_done() ? "gradients" : "activations",
                     key.second, local_.plan.describe(range.first));
}

}  // namespace torchspan::pipeline
