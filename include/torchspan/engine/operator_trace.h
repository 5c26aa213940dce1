#pragma once
// LibTorch's operators and the forwards and backwards of modules in the trace of a run: docs/observability.md.
// Includes no LibTorch.
#include <memory>
#include <string>

#include <torchspan/core/observation.h>

namespace torch::nn {
class Module;
}

namespace torchspan {

namespace engine {
class OperatorRecorder;
}

struct OperatorTraceOptions {
  /// False: records only what the spans of modules need, which is fewer spans. For long runs.
  bool operators = true;
};

/// Records LibTorch's operators and autograd nodes on all threads of this process while it lives, and which of them
/// belong to named modules: `torchspan trace` and `torchspan report` show forwards and backwards of modules. Does nothing
/// in a run that is not traced. The session's runtime must outlive it.
class OperatorTrace {
 public:
  template <RuntimeSource Source>
  explicit OperatorTrace(Source& source, OperatorTraceOptions options = {})
      : OperatorTrace(source.runtime().spans, options) {}
  explicit OperatorTrace(SpanRecorder& spans, OperatorTraceOptions options = {});
  ~OperatorTrace();
  OperatorTrace(const OperatorTrace&) = delete;
  OperatorTrace& operator=(const OperatorTrace&) = delete;

  /// Adds `module` as `name` and the modules inside it as `name.child`, as far as they have parameters: an operator that
  /// uses a parameter, while gradients are enabled, belongs to the module that registers it. A parameter that was added
  /// before keeps its module. Thread-safe. Keeps the parameters until this object is destroyed.
  void add(const std::string& name, const torch::nn::Module& module);

 private:
  std::shared_ptr<engine::OperatorRecorder> recorder_;  ///< null if the run is not traced
};

}  // namespace torchspan
