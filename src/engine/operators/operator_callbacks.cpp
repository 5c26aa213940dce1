#include "engine/operators/operator_callbacks.h"

#include <algorithm>
#include <utility>

namespace torchspan::engine {
namespace {

/// An operator that has begun, for each recorder that there was then.
struct BegunOperator : at::ObserverContext {
  struct Part {
    std::shared_ptr<OperatorRecorder> recorder;
    OperatorRecorder::Begun begun;
  };
  std::vector<Part> parts;
};

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  const auto recorders = OperatorCallbacks::of_process().recorders();
  if (recorders->empty()) return nullptr;
  auto operation = std::make_unique<BegunOperator>();
  for (const auto& recorder : *recorders) operation->parts.push_back({recorder, recorder->begin(function)});
  return operation;
}

void end_operator(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const auto& part : static_cast<BegunOperator*>(context)->parts) {
    part.recorder->end(function, part.begun);
  }
}

}  // namespace

OperatorCallbacks& OperatorCallbacks::of_process() {
  static OperatorCallbacks only;
  return only;
}

void OperatorCallbacks::add(std::shared_ptr<OperatorRecorder> recorder) {
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

void OperatorCallbacks::remove(const std::shared_ptr<OperatorRecorder>& recorder) {
  MutexLock lock(mutex_);
  Recorders changed = *recorders_;
  std::erase(changed, recorder);
  const bool last = changed.empty();
  recorders_ = std::make_shared<const Recorders>(std::move(changed));
  if (last) at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
}

std::shared_ptr<const OperatorCallbacks::Recorders> OperatorCallbacks::recorders() const {
  MutexLock lock(mutex_);
  return recorders_;
}

}  // namespace torchspan::engine
