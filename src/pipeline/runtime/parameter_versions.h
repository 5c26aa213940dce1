#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"

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

/// Returns why the layers of this worker cannot have several versions, or an empty text.
std::string why_not_versioned(const LocalPipeline& local);

}  // namespace torchspan::pipeline
