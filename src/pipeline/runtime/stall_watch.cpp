#include "pipeline/runtime/stall_watch.h"

#include <algorithm>
#include <fmt/format.h>

#include "core/api/timeout_notice.h"
#include "pipeline/runtime/step_failures.h"

namespace torchspan::pipeline {

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

std::optional<Error> StallWatch::look(std::uint64_t step, const std::string& waiting_for) {
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
      if (error.kind() == ErrorKind::kDisconnected) return gone(local_, step, question.rank, error);
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
    return question.answer.done() && question.answer.wait().busy;
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
