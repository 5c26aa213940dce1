#pragma once
#include "engine/api/grad_field_sink.h"
#include "tests/parity/autograd_world.h"

/// Graphs whose backward is slow, leaves for them, and callbacks after passes.
namespace torchspan::testing {

inline at::Tensor parameter() { return at::ones({2}, at::kDouble).set_requires_grad(true); }

/// Its backward sleeps, in the world's time.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, Runtime& runtime,
                            std::int64_t nanoseconds) {
    context->saved_data["runtime"] = reinterpret_cast<std::int64_t>(&runtime);
    context->saved_data["nanoseconds"] = nanoseconds;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& runtime = *reinterpret_cast<Runtime*>(context->saved_data.at("runtime").toInt());
    runtime.executor.sleep(Duration(context->saved_data.at("nanoseconds").toInt()));
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

inline at::Tensor sleeps_in_backward(const at::Tensor& x, Runtime& runtime, Duration time) {
  return Sleep::apply(x, runtime, time.count());
}

/// Requests a callback after each pass that reaches `parameter`, as a data-parallel reducer does.
struct AfterPass : engine::GradientHook {
  AfterPass(at::Tensor parameter, std::function<void()> act)
      : GradientHook(std::move(parameter), std::make_shared<engine::NativeEnginePasses>()),
        act(std::move(act)) {}
  void gradient_ready(engine::GradientSink& sink, const at::Tensor&) override {
    sink.after_pass([act = act](const engine::PassStatus&) { act(); });
  }
  std::function<void()> act;
};

}  // namespace torchspan::testing
