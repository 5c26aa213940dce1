#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pipeline/runtime/parameter_versions.h"
#include "pipeline/runtime/step.h"

namespace torchspan::pipeline {

/// Steps of PipelineOptions::staleness 1: while one ends on all workers, the next one runs its first actions. Each has
/// the parameters of its beginning, and its own gradients. A failure of a step appears when that step is to end, so
/// that all workers fail in the same call. Used by the training thread.
class OverlappedSteps {
 public:
  OverlappedSteps(const LocalPipeline& local, std::vector<at::Tensor> parameters)
      : local_(local), versions_(std::move(parameters)) {}
  ~OverlappedSteps() { drop(); }
  OverlappedSteps(const OverlappedSteps&) = delete;
  OverlappedSteps& operator=(const OverlappedSteps&) = delete;

  /// The step that has begun and not ended.
  std::optional<std::uint64_t> in_flight() const { return older_ ? std::optional(older_->id) : std::nullopt; }
  /// Whether that step has backwards.
  bool trains() const { return older_ && older_->step && has_backwards(older_->step->begin().kind); }
  /// Begins step `id` with the current parameters. A failure of `prepare` is kept, and reported to the other workers.
  void begin(std::uint64_t id, const std::function<StepWork()>& prepare);
  /// Ends the older step, and runs actions of the one begun after it while it waits. Adds its gradients to `.grad` and
  /// returns its report and loss; nullopt: no step was in flight. Throws its failure, which drops both steps.
  struct Ended {
    StepReport report;
    double loss = 0;
    bool trained = false;  ///< it had backwards
  };
  std::optional<Ended> end();
  /// Forgets all steps and their gradients.
  void drop();

 private:
  struct Entry {
    std::uint64_t id = 0;
    ParameterVersions::Version version;
    std::unique_ptr<Step> step;    ///< null if it could not begin
    std::optional<Error> failure;  ///< the other workers have a report
  };
  class Filler;
  Ended run_older();
  void fail(Entry& entry);
  void drop(std::unique_ptr<Entry>& entry);

  const LocalPipeline& local_;
  const ParameterVersions versions_;
  std::unique_ptr<Entry> older_;
  std::unique_ptr<Entry> newer_;  ///< within a call
};

}  // namespace torchspan::pipeline
