#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>
#include <torchspan/engine/operator_trace.h>

namespace torchspan::engine {

/// Writes spans for the operators that LibTorch's callbacks report. Thread-safe: callbacks of other threads may still run
/// after stop().
class OperatorRecorder {
 public:
  OperatorRecorder(SpanRecorder& spans, const OperatorTraceOptions& options)
      : spans_(&spans), options_(options) {}

  /// See OperatorTrace::add().
  void add(const std::string& name, const torch::nn::Module& module);
  /// Records nothing from now on; the spans' recorder may then be destroyed.
  void stop();

  /// A parameter that an operator uses.
  struct Use {
    std::size_t parameter = 0;
    bool view = false;  ///< such as the transposed weight
  };
  /// An operator that has begun.
  struct Begun {
    TimePoint at;
    std::optional<Use> use;        ///< makes it the operator of a module
    std::uint64_t first_node = 0;  ///< sequence number of the first autograd node that it creates
  };
  Begun begin(const at::RecordFunction& function);
  void end(const at::RecordFunction& function, const Begun& begun);

 private:
  struct Parameter {
    std::string module;
    std::int32_t number = 0;  ///< within the module
  };

  std::optional<Use> find(const at::Tensor& tensor) const TORCHSPAN_REQUIRES(mutex_);
  std::optional<Use> find(const c10::IValue& input) const TORCHSPAN_REQUIRES(mutex_);

  Mutex mutex_;
  SpanRecorder* spans_ TORCHSPAN_GUARDED_BY(mutex_);  ///< null after stop()
  const OperatorTraceOptions options_;
  std::vector<Parameter> parameters_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<at::Tensor> kept_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< so that no other tensor gets an address below
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_ TORCHSPAN_GUARDED_BY(mutex_);
  /// Threads inside an operator of a module: operators that it calls belong to it already.
  std::unordered_map<std::uint64_t, int> inside_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::engine
