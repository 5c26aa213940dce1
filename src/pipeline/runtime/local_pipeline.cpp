#include "pipeline/runtime/local_pipeline.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torch/nn/module.h>

#include <torchspan/detail/device/streams.h>

#include "core/api/timeout_notice.h"

namespace torchspan::pipeline {
namespace {

constexpr Duration kReportLimit = std::chrono::seconds(1);
/// A worker that has no such pipeline any more has ended the step, or its failure has. The message that says so may come later,
/// from another worker.
constexpr Duration kGoneLimit = std::chrono::seconds(2);
bool is_gone(const Error& error) { return error.kind() == ErrorKind::kInvalid; }

/// Puts the failure of a message into an event queue.
class EventOnFailure final : public rpc::Completion {
 public:
  EventOnFailure(std::weak_ptr<EventQueue> event_queue, std::weak_ptr<rpc::WorkerBackend> backend, StepId id,
                 std::uint32_t rank)
      : event_queue_(std::move(event_queue)), backend_(std::move(backend)), id_(id), rank_(rank) {}
  void succeed(wire::Payload&) override {}
  void fail(std::exception_ptr error) override {
    const NotSent event{id_, rank_, to_error(error)};
    const auto put = [queue = event_queue_, event](const Future<void>&) {
      if (auto event_queue = queue.lock()) event_queue->put(event);
    };
    const auto backend = is_gone(event.error) ? backend_.lock() : nullptr;
    if (!backend) return put({});
    Worker(backend).delay(kGoneLimit).add_done_callback(put);
  }

 private:
  const std::weak_ptr<EventQueue> event_queue_;
  const std::weak_ptr<rpc::WorkerBackend> backend_;
  const StepId id_;
  const std::uint32_t rank_;
};

/// The replica of a worker, and its index in the plan; nullopt for workers of other pipelines.
std::optional<std::pair<std::size_t, std::size_t>> find_worker(const ReplicaGrid& grid, std::uint32_t rank) {
  for (std::size_t replica = 0; replica < grid.ranks.size(); ++replica) {
    const auto& ranks = grid.ranks[replica];
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found != ranks.end()) return std::pair(replica, static_cast<std::size_t>(found - ranks.begin()));
  }
  return std::nullopt;
}

/// Why a worker died or left, which a request to it reports at once.
Error reason_of_absence(const LocalPipeline& local, std::uint64_t step, std::uint32_t rank) {
  try {
    const Deadline until = local.executor().deadline_in(kReportLimit);
    static_cast<void>(
        local.worker.request(static_cast<int>(rank), AskState{{local.id, step}}, until).wait(until));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDisconnected) return error;
  }
  return {ErrorKind::kDisconnected, "it died or left before the step"};
}

}  // namespace

std::optional<c10::Device> LocalPipeline::device_of_range(int range) const {
  const LayerRange& orders = plan.layer_ranges[static_cast<std::size_t>(range)];
  std::optional<c10::Device> device;
  for (int order = orders.first; order <= orders.last && device::has_streams(); ++order) {
    const LayerUse& use = uses[static_cast<std::size_t>(order)];
    const auto& module = layers[static_cast<std::size_t>(use.layer)].module;
    if (!module) continue;
    for (const at::Tensor& parameter : module->parameters()) {
      const bool same = !device || *device == parameter.device();
      if (!same || !device::has_streams(parameter.device())) return std::nullopt;
      device = parameter.device();
    }
  }
  return device;
}

std::string LocalPipeline::describe(const schedule::Action& action) const {
  // The table's stages are the plan's layer ranges.
  const LayerRange& range = plan.layer_ranges[static_cast<std::size_t>(action.stage)];
  constexpr const char* kNames[] = {"forward", "backward", "input gradient", "weight gradient"};
  return fmt::format("the {} of micro-batch {} through {}{}", kNames[static_cast<int>(action.kind)],
                     action.micro_batch, plan.describe(range.first),
                     range.last == range.first ? "" : " and the layers after it");
}

std::shared_ptr<rpc::Completion> LocalPipeline::event_on_failure(StepId step, std::uint32_t rank) const {
  return std::make_shared<EventOnFailure>(event_queue, worker.backend(), step, rank);
}

Error LocalPipeline::unreachable(std::uint64_t step, std::uint32_t rank, const Error& reason) const {
  const auto [replica, index] = *find_worker(grid, rank);
  std::vector<int> stages;
  for (std::size_t stage = 0; stage < plan.worker_of_stage.size(); ++stage) {
    if (plan.worker_of_stage[stage] == static_cast<int>(index)) stages.push_back(static_cast<int>(stage));
  }
  const std::string& name = grid.names[replica][index];
  const std::string of_replica = grid.count() > 1 ? fmt::format(" of replica {}", replica) : std::string();
  return Error(reason.kind(), fmt::format("step {} of pipeline '{}' ends: worker '{}' (rank {}), which owns "
                                          "stage {}{}, is unreachable: {}",
                                          step, options.name, name, rank, fmt::join(stages, ", "), of_replica,
                                          reason.message()))
      .with_worker(name);
}

void LocalPipeline::throw_failure(std::uint64_t step, const StepEvent& event) const {
  if (const auto* failed = std::get_if<StepFailed>(&event)) throw EndedElsewhere(failed->error);
  if (const auto* departure = std::get_if<Departure>(&event)) {
    if (find_worker(grid, departure->rank)) throw unreachable(step, departure->rank, departure->error);
  }
  if (const auto* lost = std::get_if<NotSent>(&event)) throw unreachable(step, lost->rank, lost->error);
}

void LocalPipeline::report_failure(std::uint64_t step, const Error& error) const {
  const Deadline until = executor().deadline_in(kReportLimit);
  const StepFailed report{{id, step}, error};
  std::vector<Future<StepFailed::Reply>> replies;
  for (const std::uint32_t rank : grid.all_ranks()) {
    if (rank == rank_of(me) || !worker.backend()->is_present(rank)) continue;
    try {
      replies.push_back(worker.request(static_cast<int>(rank), report, until));
    } catch (const Error&) {  // the worker departed meanwhile
    }
  }
  for (const auto& reply : replies) {
    try {
      reply.wait(until);
    } catch (const Error&) {  // a worker that departed, is stopped, or has no such pipeline any more
    }
  }
}

void LocalPipeline::check_presence(std::uint64_t step) const {
  for (const std::uint32_t rank : grid.all_ranks()) {
    if (worker.backend()->is_present(rank)) continue;
    throw unreachable(step, rank, reason_of_absence(*this, step, rank));
  }
}

Duration StallWatch::patience() const {
  return std::clamp<Duration>(local_.options.stall_timeout / 4, std::chrono::milliseconds(1),
                              std::chrono::seconds(1));
}

void StallWatch::ask(std::uint64_t step) {
  asked_.clear();
  for (std::size_t replica = 0; replica < local_.grid.names.size(); ++replica) {
    for (std::size_t worker = 0; worker < local_.grid.names[replica].size(); ++worker) {
      const std::string& name = local_.grid.names[replica][worker];
      if (name == local_.worker.name()) continue;
      asked_.push_back(
          {name, local_.grid.ranks[replica][worker],
           local_.worker.request(Destination(name), AskState{{local_.id, step}}, Deadline::never())});
    }
  }
}

void StallWatch::call_user(std::uint64_t step, const std::string& waiting_for) const {
  if (!local_.options.while_waiting) return;
  try {
    local_.options.while_waiting();
  } catch (...) {
    const ExceptionDescription description = describe(std::current_exception());
    throw Error(
        ErrorKind::kRemoteFailure,
        fmt::format("step {} of pipeline '{}' was interrupted on worker '{}', which waited for {}: {}", step,
                    local_.options.name, local_.worker.name(), waiting_for, description.text))
        .with_worker(local_.worker.name());
  }
}

std::optional<Error> StallWatch::check(std::uint64_t step, const std::string& waiting_for) {
  call_user(step, waiting_for);
  const double limit = to_seconds(local_.options.stall_timeout);
  const double waited = to_seconds(local_.executor().now() - since_);
  const auto report = [&](const std::string& peer) {
    report_timeout({.kind = "pipeline",
                    .name = fmt::format("step of pipeline {}", local_.options.name),
                    .peer = peer,
                    .detail = waiting_for,
                    .seconds = waited,
                    .id = step});
  };
  const auto stalled = [&](const std::string& name, const std::string& what) {
    report(name);
    return Error(ErrorKind::kTimedOut,
                 fmt::format("step {} of pipeline '{}' stalled: worker '{}' {}; worker '{}' "
                             "waits for {}. Raise PipelineOptions::stall_timeout to wait longer",
                             step, local_.options.name, name, what, local_.worker.name(), waiting_for))
        .with_worker(name);
  };
  for (const Question& question : asked_) {
    if (!question.answer.done()) {
      if (waited > limit)
        return stalled(question.worker, fmt::format("has not answered for {:.1f} s", waited));
      continue;
    }
    if (question.answer.error()) {
      const Error error = to_error(question.answer.error());
      if (is_gone(error) && waited < to_seconds(patience() + kGoneLimit)) continue;
      if (error.kind() == ErrorKind::kDisconnected) return local_.unreachable(step, question.rank, error);
      return Error(error.kind(), fmt::format("step {} of pipeline '{}' ends: {}", step, local_.options.name,
                                             error.message()))
          .with_worker(question.worker);
    }
    const WorkerState state = question.answer.wait();
    if (state.busy && state.seconds > limit) {
      return stalled(question.worker, fmt::format("has been in {} for {:.1f} s", state.doing, state.seconds));
    }
    if (waited > limit && !state.in_step && state.step <= step) {
      return stalled(question.worker,
                     fmt::format("has not begun the step ({})",
                                 state.doing.empty() ? "it has run none yet" : "last: " + state.doing));
    }
  }
  const bool all_answered =
      std::all_of(asked_.begin(), asked_.end(), [](const Question& q) { return q.answer.done(); });
  const bool any_busy = std::any_of(asked_.begin(), asked_.end(), [](const Question& question) {
    return question.answer.done() && !question.answer.error() && question.answer.wait().busy;
  });
  if (waited > limit && all_answered && !asked_.empty() && !any_busy) {
    report("");
    return Error(ErrorKind::kTimedOut,
                 fmt::format("step {} of pipeline '{}' stalled: no worker has an action to run; worker "
                             "'{}' waits for {}",
                             step, local_.options.name, local_.worker.name(), waiting_for));
  }
  if (all_answered) ask(step);
  return std::nullopt;
}

}  // namespace torchspan::pipeline
