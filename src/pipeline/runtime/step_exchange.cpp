#include "pipeline/runtime/step_exchange.h"

#include <utility>

namespace torchspan::pipeline {

StepExchange::StepExchange(const LocalPipeline& local, const StepBegin& begin)
    : statistics_(local, begin.id), sums_(local, begin), tied_(local, begin.id) {}

void StepExchange::begin() {
  if (std::exchange(begun_, true)) return;
  sums_.begin();
  tied_.begin();
}

void StepExchange::backwards_ended() {
  tied_.send();
  tying_ = true;
}

bool StepExchange::advance() {
  if (tying_ && tied_.complete()) {
    tying_ = false;
    tied_.finish();
    sums_.ties_ended();
  }
  if (tying_ || !sums_.complete() || !statistics_.complete()) return false;
  sums_.finish();
  statistics_.finish();
  return true;
}

const char* StepExchange::waiting_for() const {
  if (tying_) return "wait for the gradients of tied parameters";
  if (!sums_.complete()) return "wait for the gradients of the other replicas";
  return statistics_.complete() ? nullptr : "wait for the batch statistics of the other replicas";
}

}  // namespace torchspan::pipeline
