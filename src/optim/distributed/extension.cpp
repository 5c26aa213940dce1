#include <fmt/format.h>
#include <map>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/rpc/worker.h>

#include "core/api/throw_invalid.h"
#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"
#include "optim/distributed/messages.h"
#include "optim/distributed/step_queue.h"
#include "optim/parameters.h"

namespace torchspan::optim {
namespace {

/// Throws Error{kInvalid} naming the parameter if DistributedDataParallel averages its gradient, or another
/// optimizer steps it, during the pass.
void refuse_shared_gradient(const at::Tensor& parameter, const std::string& name) {
  for (const engine::GradientHook* hook : engine::gradient_hooks(parameter)) {
    if (hook->use() == engine::GradientUse::kReads) continue;
    throw_invalid("{} cannot be stepped in backward, because {}; call step() instead", name,
                  hook->use() == engine::GradientUse::kAverages
                      ? "DistributedDataParallel averages its gradient afterwards"
                      : "another optimizer steps it in backward");
  }
}

}  // namespace

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

namespace {

/// Adds the parameters of a local value: a tensor, or those of a module.
void list_parameters(rpc::Value& value, const std::string& name, ParamGroup& group) {
  if (value.type() == typeid(at::Tensor)) {
    group.parameters.push_back(*static_cast<at::Tensor*>(value.address()));
    group.names.push_back(name);
    return;
  }
  auto* module = value.object<torch::nn::Module>();
  if (module == nullptr) {
    throw_invalid(
        "a target is a '{}', which is neither a module nor a tensor; pass RRefs of modules or of parameters",
        value.type_name());
  }
  const auto parameters = named_parameters_of(*module);
  if (parameters.empty()) {
    throw_invalid("a target of type '{}' has no parameters that can be trained", value.type_name());
  }
  for (const auto& [own_name, parameter] : parameters) {
    group.parameters.push_back(parameter);
    group.names.push_back(fmt::format("{}.{}", name, own_name));
  }
}

using ReadyMark = std::shared_ptr<const device::Mark>;

/// Marks that the current stream has produced `gradient`; null on devices without streams.
ReadyMark ready_now(const at::Tensor& gradient, const device::EventPoolPtr& events) {
  if (!device::has_streams(gradient.device())) return nullptr;
  return std::make_shared<const device::Mark>(device::current_stream(gradient.device()), events);
}

/// Makes this thread's current stream wait for the mark.
void wait_for(const device::Mark& ready, const at::Tensor& gradient) {
  const c10::Stream here = device::current_stream(gradient.device());
  ready.hold_back(here);
  device::keep_memory_for(gradient, here);
}

}  // namespace

/// The optimizers on this worker.
class OptimExtension::Impl : public std::enable_shared_from_this<OptimExtension::Impl> {
 public:
  Impl(OptimizerTable table, rpc::Registrar& registrar)
      : table_(std::move(table)),
        worker_(registrar.worker().backend()->weak_from_this()),
        continuations_(registrar.continuations()),
        queue_(registrar.continuations()) {}

  void create(std::uint32_t maker, const CreateOptimizer& message) {
    const std::uint64_t departures = departures_of(maker);
    auto owned = std::make_shared<Owned>();
    std::vector<ParamGroup> groups;
    for (const OptimizerGroup& part : message.groups) {
      ParamGroup& group = groups.emplace_back(std::vector<at::Tensor>(), part.spec);
      group.label = part.label;
      group.hogwild = part.hogwild;
      for (const OptimizerTarget& target : part.targets) {
        if (!target.value) throw_invalid("a target is an empty RRef");
        // Ready: a handler runs when the references of its message are.
        owned->values.push_back(target.value->value(Deadline::never()));
        list_parameters(*owned->values.back(), target.name, group);
      }
      warn_of_frozen_targets(group);
    }
    owned->optimizer = std::make_unique<Optimizer>(std::move(groups), &table_);
    for (const at::Tensor& parameter : owned->optimizer->parameters()) {
      owned->keys.insert(parameter.unsafeGetTensorImpl());
    }
    owned->keys.insert(owned.get());  // so that steps of single parameters also run one after another
    const bool present = worker().backend()->is_present(maker);
    MutexLock lock(mutex_);
    if (!present || departures_[maker] != departures)
      throw Error(ErrorKind::kDisconnected, "the worker that creates this optimizer has died or left");
    optimizers_[message.id] = std::move(owned);
  }

  /// A module that is partly frozen is ordinary; a target of which nothing is trained may be a mistake.
  void warn_of_frozen_targets(const ParamGroup& group) const {
    std::map<std::string, bool> trained;  // by target; a local module's parameters are targets "0.weight"
    for (std::size_t i = 0; i < group.parameters.size(); ++i)
      trained[group.names[i].substr(0, group.names[i].find('.'))] |= group.parameters[i].requires_grad();
    for (const auto& [target, is_trained] : trained) {
      if (is_trained) continue;
      worker().runtime().log.warning(fmt::format(
          "target {} of group {} of a DistributedOptimizer requires no gradient, so no backward pass trains "
          "it: call requires_grad_(true) on its owner, or leave it out",
          target, group.label));
    }
  }

  /// Destroys the optimizers of a worker that died or left. The pool does it, because modules may be destroyed
  /// with them and this thread must not run user code.
  void depart(std::uint32_t rank) {
    std::vector<std::shared_ptr<Owned>> gone;
    {
      MutexLock lock(mutex_);
      ++departures_[rank];
      for (auto it = optimizers_.begin(); it != optimizers_.end();) {
        if (it->first.worker != rank) {
          ++it;
          continue;
        }
        gone.push_back(std::move(it->second));
        it = optimizers_.erase(it);
      }
    }
    const auto continuations = continuations_.lock();
    if (continuations && !gone.empty())
      continuations->post([gone = std::move(gone)]() mutable { gone.clear(); });
  }

  Future<bool> step(const StepOptimizer& message) {
    auto owned = find(message.id);
    auto saw_pass = std::make_shared<bool>(false);
    return queue_
        .run(owned->keys,
             [this, owned, message, saw_pass] { *saw_pass = step_now(*owned->optimizer, message); })
        .then([saw_pass](const Future<Unit>& done) {
          done.wait();
          return *saw_pass;
        });
  }

  /// This may be the first message of the context here, so it joins the context.
  void step_in_backward(std::uint32_t peer, const StepInBackward& message) {
    const std::shared_ptr<Owned> asked = find(message.id);
    const RatesPtr rates = rates_in_backward(message, *asked);
    if (!rates) return;
    const std::weak_ptr<Owned> owner = asked;
    worker()
        .extension<autograd::AutogradExtension>()
        .join(message.context, peer)
        .offer_gradients([weak = weak_from_this(), owner, rates](
                             const at::Tensor& parameter, at::Tensor& gradient,
                             const autograd::PassRuns& runs) -> std::optional<Future<void>> {
          const auto self = weak.lock();
          const auto owned = owner.lock();
          if (!self || !owned || !owned->keys.contains(parameter.unsafeGetTensorImpl())) return std::nullopt;
          refuse_shared_gradient(parameter, owned->optimizer->describe(parameter));
          return self->queue_
              .run({parameter.unsafeGetTensorImpl(), owned.get()},
                   [owned, rates, parameter, runs, ready = ready_now(gradient, self->events_),
                    gradient = std::exchange(gradient, {})] {
                     if (ready) wait_for(*ready, gradient);
                     if (!runs())
                       throw Error(ErrorKind::kCancelled, "the backward pass failed before this step");
                     owned->optimizer->set_lrs(rates->get());
                     owned->optimizer->step_one(parameter, gradient);
                   })
              .then([](const Future<Unit>& done) { done.wait(); });
        });
  }

  GradientNorm norm(const NormOfGradients& message) const {
    const auto owned = find(message.id);
    const auto context = find_context(message.context);
    GradientNorm result;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : owned->optimizer->parameters()) {
      if (!parameter.requires_grad()) continue;
      const bool averaged = engine::has_gradient_use(parameter, engine::GradientUse::kAverages);
      std::string& example = averaged ? result.averaged : result.own;
      if (example.empty()) example = owned->optimizer->describe(parameter);
      if (context) gradients.push_back(context->gradient(parameter));
    }
    result.norm = gradient_norm(gradients, message.norm_type);
    return result;
  }

  /// Returns the result of `use`, which runs while none of the optimizer's parameters is stepped.
  template <class R>
  Future<R> use(GlobalId id, std::function<R(Optimizer&)> use) {
    auto owned = find(id);
    auto result = std::make_shared<std::optional<R>>();
    return queue_
        .run(owned->keys, [owned, result, use = std::move(use)] { *result = use(*owned->optimizer); })
        .then([result](const Future<Unit>& done) {
          done.wait();
          return std::move(**result);
        });
  }

  /// A copy of the state, with `rates` as its learning rates.
  Future<StateDict> read(GlobalId id, const std::vector<double>& rates) {
    return use<StateDict>(id, [rates](Optimizer& optimizer) {
      optimizer.set_lrs(rates);
      return optimizer.state_dict();
    });
  }

  Future<Unit> write(GlobalId id, const StateDict& state) {
    return use<Unit>(id, [state](Optimizer& optimizer) {
      optimizer.load_state_dict(state);
      return Unit{};
    });
  }

  Future<RRef<StateDict>> keep(GlobalId id, const std::vector<double>& rates) {
    return use<RRef<StateDict>>(id, [this, rates](Optimizer& optimizer) {
      optimizer.set_lrs(rates);
      return RRef<StateDict>(worker(), optimizer.state_dict());
    });
  }

  Future<std::vector<double>> take(const TakeState& message) {
    return use<std::vector<double>>(message.id, [state = message.state](Optimizer& optimizer) {
      optimizer.load_state_dict(state.local_value());
      return optimizer.lrs();
    });
  }

  void drop(GlobalId id) {
    std::shared_ptr<Owned> gone;
    MutexLock lock(mutex_);
    auto it = optimizers_.find(id);
    if (it == optimizers_.end()) return;
    gone = std::move(it->second);
    optimizers_.erase(it);
  }

  std::size_t count() const {
    MutexLock lock(mutex_);
    return optimizers_.size();
  }

 private:
  /// Learning rates of the steps in the passes of one context. Thread-safe.
  class Rates {
   public:
    void set(std::vector<double> rates) {
      MutexLock lock(mutex_);
      rates_ = std::move(rates);
    }
    std::vector<double> get() const {
      MutexLock lock(mutex_);
      return rates_;
    }

   private:
    mutable Mutex mutex_;
    std::vector<double> rates_ TORCHSPAN_GUARDED_BY(mutex_);
  };
  using RatesPtr = std::shared_ptr<Rates>;

  struct Owned {
    std::unique_ptr<Optimizer> optimizer;
    StepQueue::Keys keys;
    std::vector<rpc::ValuePtr> values;  ///< keeps the modules alive
    /// By context: of passes that it steps in, while the context lives. Guarded by mutex_.
    std::map<std::uint64_t, std::weak_ptr<Rates>> in_backward = {};
  };

  /// Null if the optimizer already steps in the passes of the context, then with the new rates. Throws Error{kInvalid} if
  /// another one does with one of its parameters, which would get the gradient alone.
  RatesPtr rates_in_backward(const StepInBackward& message, Owned& asked) {
    MutexLock lock(mutex_);
    std::erase_if(asked.in_backward, [](const auto& one) { return one.second.expired(); });
    const auto before = asked.in_backward.find(message.context);
    if (const RatesPtr known = before == asked.in_backward.end() ? nullptr : before->second.lock())
      return known->set(message.rates), nullptr;
    for (const auto& [id, other] : optimizers_) {
      const auto found = other->in_backward.find(message.context);
      if (other.get() == &asked || found == other->in_backward.end() || found->second.expired()) continue;
      for (const at::Tensor& parameter : asked.optimizer->parameters()) {
        if (!other->keys.contains(parameter.unsafeGetTensorImpl())) continue;
        throw_invalid(
            "step_in_backward() of two optimizers in autograd context {:#x} share {}: only one could take "
            "its gradient; use another context for one of them",
            message.context, asked.optimizer->describe(parameter));
      }
    }
    const RatesPtr rates = std::make_shared<Rates>();
    rates->set(message.rates);
    asked.in_backward[message.context] = rates;
    return rates;
  }

  std::shared_ptr<Owned> find(GlobalId id) const {
    MutexLock lock(mutex_);
    auto it = optimizers_.find(id);
    if (it == optimizers_.end()) {
      throw_invalid("optimizer {}:{} is not on this worker; its DistributedOptimizer was destroyed",
                    id.worker, id.local);
    }
    return it->second;
  }

  Worker worker() const {
    auto backend = worker_.lock();
    if (!backend) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return Worker(backend);
  }

  /// Nullopt if this worker does not know the context.
  std::optional<autograd::ContextView> find_context(std::uint64_t id) const {
    return worker().extension<autograd::AutogradExtension>().try_find(id);
  }

  std::uint64_t departures_of(std::uint32_t rank) const {
    MutexLock lock(mutex_);
    const auto found = departures_.find(rank);
    return found == departures_.end() ? 0 : found->second;
  }

  /// Steps; returns whether a pass has run in the context on this worker.
  bool step_now(Optimizer& optimizer, const StepOptimizer& message) const {
    optimizer.set_lrs(message.rates);
    const auto context = find_context(message.context);
    if (!context) return false;
    SpanScope span(worker().runtime().spans, SpanKind::kOptimizer, optimizer.rule(0).name(), message.context);
    optimizer.step([&](const at::Tensor& parameter) {
      const at::Tensor gradient = context->gradient(parameter);
      return gradient.defined() && message.scale != 1 ? gradient.mul(message.scale) : gradient;
    });
    return context->saw_backward();
  }

  const OptimizerTable table_;
  const std::weak_ptr<rpc::WorkerBackend> worker_;
  const std::weak_ptr<ContinuationExecutor> continuations_;
  StepQueue queue_;
  const device::EventPoolPtr events_ = std::make_shared<device::EventPool>();
  mutable Mutex mutex_;
  std::map<GlobalId, std::shared_ptr<Owned>> optimizers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint32_t, std::uint64_t> departures_ TORCHSPAN_GUARDED_BY(mutex_);  // their number, by rank
};

OptimExtension::OptimExtension(OptimizerTable table) : table_(std::move(table)) {}
OptimExtension::~OptimExtension() = default;

void OptimExtension::attach(rpc::Registrar& registrar) {
  impl_ = std::make_shared<Impl>(std::move(table_), registrar);
  std::weak_ptr<Impl> weak = impl_;
  auto impl = [weak] {
    auto alive = weak.lock();
    if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return alive;
  };
  registrar.on_departure([weak](std::uint32_t rank, const Error&) {
    if (const auto alive = weak.lock()) alive->depart(rank);
  });
  registrar.handle<CreateOptimizer>(rpc::RunOn::kPool,
                                    [impl](const rpc::CallInfo& call, const CreateOptimizer& message) {
                                      impl()->create(call.peer, message);
                                      return Unit{};
                                    });
  registrar.handle<StepOptimizer>(
      rpc::RunOn::kPool,
      [impl](const rpc::CallInfo&, const StepOptimizer& message) { return impl()->step(message); });
  registrar.handle<StepInBackward>(rpc::RunOn::kPool,
                                   [impl](const rpc::CallInfo& call, const StepInBackward& message) {
                                     impl()->step_in_backward(call.peer, message);
                                     return Unit{};
                                   });
  registrar.handle<DropOptimizer>(rpc::RunOn::kPool,
                                  [impl](const rpc::CallInfo&, const DropOptimizer& message) {
                                    impl()->drop(message.id);
                                    return Unit{};
                                  });
  registrar.handle<NormOfGradients>(
      rpc::RunOn::kPool,
      [impl](const rpc::CallInfo&, const NormOfGradients& message) { return impl()->norm(message); });
  registrar.handle<ReadState>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const ReadState& message) {
    return impl()->read(message.id, message.rates);
  });
  registrar.handle<WriteState>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const WriteState& message) {
    return impl()->write(message.id, message.state);
  });
  registrar.handle<KeepState>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const KeepState& message) {
    return impl()->keep(message.id, message.rates);
  });
  registrar.handle<TakeState>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const TakeState& message) {
    return impl()->take(message);
  });
}

std::size_t OptimExtension::count() const { return impl_ ? impl_->count() : 0; }

}  // namespace torchspan::optim
