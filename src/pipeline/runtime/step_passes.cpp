#include "pipeline/runtime/step_passes.h"

#include <fmt/format.h>

namespace torchspan::pipeline {

using schedule::ActionKind;

namespace {

/// See RunMode::unordered.
const char* unordered(const LocalPipeline& local, StepKind kind) {
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

StepPasses::StepPasses(const LocalPipeline& local, const StepBegin& begin, Policy& policy,
                       const PassResources& resources)
    : local_(local),
      id_(begin.id),
      micro_batches_(static_cast<int>(begin.rows.size())),
      random_step_(begin.random_step),
      has_backwards_(has_backwards(begin.kind)),
      unordered_(unordered(local, begin.kind)),
      policy_(policy),
      resources_(resources) {}

LayerRangePass& StepPasses::at(int range, int micro_batch) {
  auto& slot = passes_[{range, micro_batch}];
  if (!slot) {
    const ActivationCheckpoint checkpoint = local_.options.checkpoint;
    const bool last = micro_batch == micro_batches_ - 1;
    const bool recompute = has_backwards_ && (checkpoint == ActivationCheckpoint::kAlways ||
                                              (checkpoint == ActivationCheckpoint::kExceptLast && !last));
    slot = std::make_unique<LayerRangePass>(local_, range, micro_batch,
                                            RunMode{id_.step, has_backwards_, recompute, resources_.cache,
                                                    random_step_, resources_.offloader, unordered_});
  }
  return *slot;
}

LayerRangePass* StepPasses::find(int range, int micro_batch) {
  const auto found = passes_.find({range, micro_batch});
  return found == passes_.end() ? nullptr : found->second.get();
}

void StepPasses::check_backward(int range, int micro_batch) {
  if (has_backwards_ && at(range, micro_batch).has_gradients())
    policy_.became_ready({ActionKind::kBackward, range, micro_batch});
}

void StepPasses::deliver(int link, int micro_batch, Activation activation) {
  const int to = link == kOutside ? 0 : local_.plan.links[static_cast<std::size_t>(link)].to;
  if (local_.owns_layer_range(to)) {
    LayerRangePass& pass = at(to, micro_batch);
    pass.put_input(link, std::move(activation));
    if (pass.has_inputs()) policy_.became_ready({ActionKind::kForward, to, micro_batch});
    return;
  }
  Activations message;
  message.id = id_;
  message.micro_batch = micro_batch;
  message.link = link;
  message.tuple = activation.batch.tuple;
  message.members = std::move(activation.batch.members);
  message.wants_gradient = std::move(activation.wants_gradient);
  message.unsplit = std::move(activation.batch.unsplit);
  // A receiver copies what is sent to its device when it arrives. Inputs of micro-batches whose forward has not begun
  // would take the memory that offload saves; in a step without backwards, nothing limits their number.
  if (!local_.options.offload && has_backwards_)
    message.place = local_.grid.devices.of_range(local_.rank_of(range_of(to).worker), to);
  local_.post_to(range_of(to).worker, message);
}

void StepPasses::deliver_gradients(int link, int micro_batch, std::vector<at::Tensor> gradients) {
  const int from = local_.plan.links[static_cast<std::size_t>(link)].from;
  if (local_.owns_layer_range(from)) {
    at(from, micro_batch).put_gradients(link, std::move(gradients));
    return check_backward(from, micro_batch);
  }
  const int worker = range_of(from).worker;
  local_.post_to(worker, Gradients{id_, micro_batch, link, std::move(gradients),
                                   local_.grid.devices.of_range(local_.rank_of(worker), from)});
}

bool StepPasses::is_known(int link, int micro_batch) const {
  return link >= 0 && link < static_cast<int>(local_.plan.links.size()) && micro_batch >= 0 &&
         micro_batch < micro_batches_;
}

void StepPasses::accept(Activations& event) {
  const bool valid = is_known(event.link, event.micro_batch) &&
                     event.members.size() == event.wants_gradient.size() &&
                     event.unsplit.size() <= event.members.size();
  if (!valid || !local_.owns_layer_range(local_.plan.links[static_cast<std::size_t>(event.link)].to)) {
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

void StepPasses::accept(Gradients& event) {
  if (!is_known(event.link, event.micro_batch) ||
      !local_.owns_layer_range(local_.plan.links[static_cast<std::size_t>(event.link)].from)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("gradients of link {}, micro-batch {}, do not belong to this worker", event.link,
                            event.micro_batch));
  }
  deliver_gradients(event.link, event.micro_batch, std::move(event.gradients));
}

Awaited StepPasses::awaited() const {
  if (passes_.empty()) return {"wait for activations"};
  const auto& [key, oldest] = *passes_.begin();
  const WaitNames& names = local_.wait_names[static_cast<std::size_t>(key.first)];
  return {oldest->forward_done() ? names.gradients : names.activations, key.second};
}

std::string StepPasses::waiting_for() const {
  if (passes_.empty()) return "activations";
  const auto& [key, oldest] = *passes_.begin();
  return fmt::format("{} of micro-batch {} at {}", oldest->forward_done() ? "gradients" : "activations",
                     key.second, local_.plan.describe(range_of(key.first).first));
}

}  // namespace torchspan::pipeline
