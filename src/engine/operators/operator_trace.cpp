#include <torchspan/engine/operator_trace.h>

#include "engine/operators/operator_callbacks.h"
#include "engine/operators/operator_recorder.h"

namespace torchspan {

OperatorTrace::OperatorTrace(SpanRecorder& spans, OperatorTraceOptions options) {
  if (!spans.is_traced()) return;
  recorder_ = std::make_shared<engine::OperatorRecorder>(spans, options);
  engine::OperatorCallbacks::of_process().add(recorder_);
}

OperatorTrace::~OperatorTrace() {
  if (!recorder_) return;
  engine::OperatorCallbacks::of_process().remove(recorder_);
  recorder_->stop();
}

void OperatorTrace::add(const std::string& name, const torch::nn::Module& module) {
  if (recorder_) recorder_->add(name, module);
}

}  // namespace torchspan
