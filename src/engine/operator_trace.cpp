#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define NDEBUG  // as in LibTorch; see inputs_of(). cmake/torch_whole.h includes it so, too
#include <ATen/record_function.h>
#pragma pop_macro("NDEBUG")
#include <torch/nn/module.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>
#include <torchspan/engine/operator_trace.h>

#include "core/api/span_kinds.h"

namespace torchspan::engine {
namespace {

/// Returns the inputs of an operator, within the callback of its beginning. RecordFunction::inputs() asserts a flag in
/// debug builds that LibTorch sets only if it was compiled as a debug build itself; this compiles without the assertion.
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function) { return function.inputs(); }

/// The name of the module that registers the parameter `path`, such as "layers.0.weight", inside the module `name`.
std::string module_of(const std::string& name, const std::string& path) {
  const std::size_t end = path.rfind('.');
  const std::string inner = end == std::string::npos ? "" : path.substr(0, end);
  if (name.empty()) return inner.empty() ? "model" : inner;
  return inner.empty() ? name : name + "." + inner;
}

}  // namespace

/// Writes spans for the operators that LibTorch's callbacks report. Thread-safe: callbacks of other threads may still run
/// after stop().
class OperatorRecorder {
 public:
  OperatorRecorder(SpanRecorder& spans, const OperatorTraceOptions& options)
      : spans_(&spans), options_(options) {}

  /// See OperatorTrace::add().
  void add(const std::string& name, const torch::nn::Module& module) {
    const auto parameters = module.named_parameters();
    std::map<std::string, std::int32_t> counts;
    MutexLock lock(mutex_);
    for (const auto& parameter : parameters) {
      if (!parameter.value().defined()) continue;
      const std::string owner = module_of(name, parameter.key());
      const std::int32_t number = counts[owner]++;
      if (!places_.emplace(parameter.value().unsafeGetTensorImpl(), parameters_.size()).second) continue;
      parameters_.push_back({owner, number});
      kept_.push_back(parameter.value());
    }
  }

  /// Records nothing from now on; the spans' recorder may then be destroyed.
  void stop() {
    MutexLock lock(mutex_);
    spans_ = nullptr;
  }

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

  Begun begin(const at::RecordFunction& function) {
    Begun begun;
    MutexLock lock(mutex_);
    if (spans_ == nullptr) return begun;
    if (function.scope() == at::RecordScope::FUNCTION && at::GradMode::is_enabled()) {
      const auto thread = inside_.find(function.threadId());
      if (thread == inside_.end()) {
        for (const c10::IValue& input : inputs_of(function)) {
          if (!begun.use) begun.use = find(input);
        }
      }
      if (begun.use) {
        inside_[function.threadId()] = 1;
        begun.first_node = at::sequence_number::peek();
      }
    }
    begun.at = spans_->executor().now();
    return begun;
  }

  void end(const at::RecordFunction& function, const Begun& begun) {
    const bool here = !function.isAsync() && function.threadId() == at::RecordFunction::currentThreadId();
    MutexLock lock(mutex_);
    if (begun.use) inside_.erase(function.threadId());
    if (spans_ == nullptr || !here || begun.at == TimePoint()) return;
    const bool backward = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
    const bool of_forward = backward && function.seqNr() >= 0 && function.forwardThreadId() != 0;
    if (options_.operators || of_forward) {
      SpanLink link;
      if (function.seqNr() >= 0) link.id = static_cast<std::uint64_t>(function.seqNr());
      if (of_forward) link.part = static_cast<std::int32_t>(function.forwardThreadId());
      spans_->record(kOperatorSpan, function.name(), begun.at, link);
    }
    if (begun.use) {
      const Parameter& parameter = parameters_[begun.use->parameter];
      spans_->record(kModuleSpan, parameter.module, begun.at,
                     {.id = begun.first_node,
                      .peer = begun.use->view ? kFirstView + parameter.number : parameter.number,
                      .part = static_cast<std::int32_t>(function.threadId()),
                      .bytes = at::sequence_number::peek() - begun.first_node});
    }
  }

 private:
  struct Parameter {
    std::string module;
    std::int32_t number = 0;  ///< within the module
  };

  std::optional<Use> find(const at::Tensor& tensor) const TORCHSPAN_REQUIRES(mutex_) {
    if (!tensor.defined()) return std::nullopt;
    const bool view = tensor.is_view();
    const auto place = places_.find((view ? tensor._base() : tensor).unsafeGetTensorImpl());
    if (place == places_.end()) return std::nullopt;
    return Use{place->second, view};
  }

  std::optional<Use> find(const c10::IValue& input) const TORCHSPAN_REQUIRES(mutex_) {
    if (input.isTensor()) return find(input.toTensor());
    if (!input.isTensorList()) return std::nullopt;
    for (const c10::IValue& element : input.toListRef()) {
      if (const auto use = find(element.toTensor())) return use;
    }
    return std::nullopt;
  }

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

namespace {

/// Connects all recorders of this process with LibTorch's callbacks, which are plain functions: they find the recorders
/// here. LibTorch has callbacks only while there is a recorder. Thread-safe. A forked child, which may have copies of held
/// locks, records nothing.
class OperatorCallbacks {
 public:
  using Recorders = std::vector<std::shared_ptr<OperatorRecorder>>;

  static OperatorCallbacks& of_process() {
    static OperatorCallbacks only;
    return only;
  }

  /// Throws Error{kInvalid} in a forked child of a process that has traced operators.
  void add(std::shared_ptr<OperatorRecorder> recorder) {
    process_.check();
    MutexLock lock(mutex_);
    Recorders changed = *recorders_;
    changed.push_back(std::move(recorder));
    recorders_ = std::make_shared<const Recorders>(std::move(changed));
    if (handle_ != at::INVALID_CALLBACK_HANDLE) return;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin_operator, &end_operator)
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                     at::RecordScope::TORCHSCRIPT_FUNCTION, at::RecordScope::USER_SCOPE}));
  }

  bool in_own_process() const { return process_.is_current(); }

  void remove(const std::shared_ptr<OperatorRecorder>& recorder) {
    MutexLock lock(mutex_);
    Recorders changed = *recorders_;
    std::erase(changed, recorder);
    const bool last = changed.empty();
    recorders_ = std::make_shared<const Recorders>(std::move(changed));
    if (last) at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
  }

  std::shared_ptr<const Recorders> recorders() const {
    MutexLock lock(mutex_);
    return recorders_;
  }

 private:
  OperatorCallbacks() = default;

  /// An operator that has begun, for each recorder that there was then.
  struct BegunOperator : at::ObserverContext {
    struct Part {
      std::shared_ptr<OperatorRecorder> recorder;
      OperatorRecorder::Begun begun;
    };
    std::vector<Part> parts;
  };

  static std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
    if (!of_process().in_own_process()) return nullptr;
    const auto recorders = of_process().recorders();
    if (recorders->empty()) return nullptr;
    auto operation = std::make_unique<BegunOperator>();
    for (const auto& recorder : *recorders) operation->parts.push_back({recorder, recorder->begin(function)});
    return operation;
  }

  static void end_operator(const at::RecordFunction& function, at::ObserverContext* context) {
    if (context == nullptr || !of_process().in_own_process()) return;
    for (const auto& part : static_cast<BegunOperator*>(context)->parts) {
      part.recorder->end(function, part.begun);
    }
  }

  const OwnerProcess process_;  ///< the one that first made a recorder
  mutable Mutex mutex_;
  std::shared_ptr<const Recorders> recorders_ TORCHSPAN_GUARDED_BY(mutex_) = std::make_shared<Recorders>();
  at::CallbackHandle handle_ TORCHSPAN_GUARDED_BY(mutex_) = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace

}  // namespace torchspan::engine

namespace torchspan {

OperatorTrace::OperatorTrace(SpanRecorder& spans, OperatorTraceOptions options) {
  if (!spans.is_traced()) return;
  recorder_ = std::make_shared<engine::OperatorRecorder>(spans, options);
  engine::OperatorCallbacks::of_process().add(recorder_);
}

OperatorTrace::~OperatorTrace() {
  if (!recorder_ || !engine::OperatorCallbacks::of_process().in_own_process()) return;
  engine::OperatorCallbacks::of_process().remove(recorder_);
  recorder_->stop();
}

void OperatorTrace::add(const std::string& name, const torch::nn::Module& module) {
  if (recorder_) recorder_->add(name, module);
}

}  // namespace torchspan
