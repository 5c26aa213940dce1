#include "autograd/contexts/context_sink.h"

#include <torchspan/core/future.h>

namespace torchspan::autograd {

void ContextSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (auto taken = context_.offer(pass(), parameter, gradient)) {
    {
      MutexLock lock(mutex_);
      std::erase_if(taken_, [](const Future<void>& done) { return done.done(); });
      taken_.push_back(*taken);
    }
    hold(std::move(*taken));
  } else {
    context_.change_gradients(pass(), [&](engine::GradientMap& gradients) {
      gradients.accumulate(parameter, std::move(gradient));
    });
  }
}

void ContextSink::replace(const at::Tensor& parameter, at::Tensor gradient) {
  context_.change_gradients(
      pass(), [&](engine::GradientMap& gradients) { gradients.replace(parameter, std::move(gradient)); });
}

Future<void> ContextSink::takers_done() const {
  std::vector<Future<void>> taken;
  {
    MutexLock lock(mutex_);
    taken = taken_;
  }
  for (Future<void>& one : taken) one = one.then([](const Future<void>&) {});
  return when_all(std::move(taken));
}

}  // namespace torchspan::autograd
