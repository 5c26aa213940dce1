#include <fmt/format.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/optim/optimizer.h>

#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"
#include "optim/distributed/shared_gradient.h"

namespace torchspan::optim {

void refuse_shared_gradient(const at::Tensor& parameter, const std::string& name) {
  for (const engine::GradientHook* hook : engine::gradient_hooks(parameter)) {
    if (hook->use() == engine::GradientUse::kReads) continue;
    throw Error(ErrorKind::kInvalid,
                fmt::format("{} cannot be stepped in backward, because {}; call step() instead", name,
                            hook->use() == engine::GradientUse::kAverages
                                ? "DistributedDataParallel averages its gradient afterwards"
                                : "another optimizer steps it in backward"));
  }
}

/// Owns a hook on the leaf node of every parameter, and these nodes.
class BackwardSteps::Impl {
 public:
  explicit Impl(Optimizer& optimizer) : shared_(std::make_shared<Shared>(optimizer)) {
    const auto passes = std::make_shared<engine::NativeEnginePasses>();
    const std::vector<at::Tensor> parameters = optimizer.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      refuse_shared_gradient(parameters[i], fmt::format("parameter {}", i));
    for (const at::Tensor& parameter : parameters) {
      // A parameter that does not require grad has no leaf node and gets no gradient.
      if (!parameter.requires_grad()) continue;
      auto leaf = torch::autograd::impl::grad_accumulator(parameter);
      const auto key = leaf->add_post_hook(std::make_unique<Hook>(parameter, passes, shared_));
      hooked_.emplace_back(std::move(leaf), key);
    }
  }
  ~Impl() {
    for (const auto& [leaf, key] : hooked_) leaf->del_post_hook(key);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

 private:
  /// Locked, because LibTorch's engine has a thread for each device.
  struct Shared {
    explicit Shared(Optimizer& given) : optimizer(given) {}
    Mutex mutex;
    Optimizer& optimizer TORCHSPAN_GUARDED_BY(mutex);
  };

  class Hook final : public engine::GradientHook {
   public:
    Hook(at::Tensor parameter, std::shared_ptr<engine::NativeEnginePasses> passes,
         std::shared_ptr<Shared> shared)
        : GradientHook(std::move(parameter), std::move(passes)), shared_(std::move(shared)) {}
    engine::GradientUse use() const override { return engine::GradientUse::kSteps; }
    void gradient_ready(engine::GradientSink& sink, const at::Tensor& parameter) override {
      // Gradients of an autograd context are for a DistributedOptimizer.
      if (!sink.writes_grad_field()) return;
      const at::Tensor gradient = sink.gradient(parameter);
      if (!gradient.defined()) return;
      sink.replace(parameter, {});
      MutexLock lock(shared_->mutex);
      shared_->optimizer.step_one(parameter, gradient);
    }

   private:
    const std::shared_ptr<Shared> shared_;
  };

  const std::shared_ptr<Shared> shared_;
  std::vector<std::pair<engine::NodePtr, std::uintptr_t>> hooked_;
};

BackwardSteps::BackwardSteps(Optimizer& optimizer) : impl_(std::make_unique<Impl>(optimizer)) {}
BackwardSteps::~BackwardSteps() = default;
BackwardSteps::BackwardSteps(BackwardSteps&&) noexcept = default;
BackwardSteps& BackwardSteps::operator=(BackwardSteps&&) noexcept = default;

}  // namespace torchspan::optim
