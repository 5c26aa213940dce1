#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/step.h"

namespace torchspan::pipeline {

/// Several values and gradients of the same parameters, one of which the parameters hold. Modules and optimizers keep
/// their tensors. Frozen parameters have one value. Used by the training thread.
class ParameterVersions {
 public:
  explicit ParameterVersions(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {}

  /// A value and a gradient for each parameter; undefined values for frozen parameters.
  struct Version {
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> gradients;
  };
  /// The current values, which share their memory with the parameters, without gradients.
  Version capture() const;
  /// Exchanges what the parameters hold with `version`. Graphs that saved parameters stay valid.
  void swap(Version& version) const;
  /// Copies the current values to new memory, so that an optimizer does not change versions that share it.
  void renew(const Version& shared) const;
  /// Adds the gradients of a version to `.grad`.
  void add_gradients(Version& version) const;

 private:
  const std::vector<at::Tensor> parameters_;
};

/// Lets the parameters hold a version until the end of a scope. Scopes may nest.
class VersionScope {
 public:
  VersionScope(const ParameterVersions& versions, ParameterVersions::Version& version)
      : versions_(versions), version_(version) {
    versions_.swap(version_);
  }
  ~VersionScope() { versions_.swap(version_); }
  VersionScope(const VersionScope&) = delete;
  VersionScope& operator=(const VersionScope&) = delete;

 private:
  const ParameterVersions& versions_;
  ParameterVersions::Version& version_;
};

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
  /// While the older step would wait and holds the activations of `held` passes: runs an action of the newer one. Returns
  /// false if none may run. Does not throw.
  bool run_next(int held);
  /// Takes an event of the newer step. Does not throw.
  void accept_next(StepEvent& event);
  /// Forgets all steps and their gradients.
  void drop();

 private:
  struct Entry {
    std::uint64_t id = 0;
    ParameterVersions::Version version;
    std::unique_ptr<Step> step;    ///< null if it could not begin
    std::optional<Error> failure;  ///< the other workers have a report
  };
  Ended run_older();
  void fail(Entry& entry);
  void drop(std::unique_ptr<Entry>& entry);

  const LocalPipeline& local_;
  const ParameterVersions versions_;
  std::unique_ptr<Entry> older_;
  std::unique_ptr<Entry> newer_;  ///< within a call
};

/// Throws Error{kInvalid} if the layers of this worker cannot have several versions.
void check_versions(const LocalPipeline& local);

}  // namespace torchspan::pipeline
