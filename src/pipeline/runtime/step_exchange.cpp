#include "pipeline/runtime/step_exchange.h"

#include <utility>

namespace torchspan::pipeline {

StepExchange::StepExchange(const LocalPipeline& local, const StepBegin& begin)
    : begins_(local, begin),
      statistics_(local, begin.id),
      sums_(local, begin, begins_),
      tied_(local, begin.id) {}

void StepExchange::begin() {
  if (std::exchange(begun_, true)) return;
  sums_.begin();
  tied_.begin();
}

void StepExchange::backwards_ended() {
  tied_.send();
  tying_ = true;
}

void StepExchange::accept(const ReplicaBegin& event) {
  begins_.accept(event);
  if (begins_.complete()) sums_.rows_known();
}

bool StepExchange::advance() {
  if (tying_ && tied_.complete()) {
    tying_ = false;
    tied_.finish();
    sums_.ties_ended();
  }
  if (tying_ || !sums_.complete() || !statistics_.complete() || !begins_.complete()) return false;
  statistics_.finish();
  return true;
}

const char* StepExchange::waiting_for() const {
  if (tying_) return "wait for the gradients of tied parameters";
  if (!sums_.complete()) return "wait for the gradients of the other replicas";
  if (!statistics_.complete()) return "wait for the batch statistics of the other replicas";
  return begins_.complete() ? nullptr : "wait for the other replicas to begin the step";
}

}  // namespace torchspan::pipeline
