#include <fmt/format.h>
#include <map>
#include <optional>

#include <torch/nn/module.h>

#include <torchspan/autograd/passes.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/optim/steps.h>
#include <torchspan/rpc/worker.h>

#include "optim/messages.h"
#include "optim/parameters.h"
#include "optim/shared_gradient.h"
#include "optim/step_queue.h"

namespace torchspan::optim {
namespace {

/// Adds the parameters of a value that lives here: a tensor itself, or those of a module.
void list_parameters(rpc::Value& value, const std::string& name, Group& group) {
  if (value.type() == typeid(at::Tensor)) {
    group.parameters.push_back(*static_cast<at::Tensor*>(value.address()));
    group.names.push_back(name);
    return;
  }
  auto* module = value.object<torch::nn::Module>();
  if (module == nullptr) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a target is a '{}', which is neither a module nor a tensor; give the "
                            "optimizer RRefs of modules or of parameters",
                            value.type_name()));
  }
  const auto parameters = named_parameters_of(*module);
  if (parameters.empty()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a target of type '{}' has no parameters", value.type_name()));
  }
  for (const auto& [own_name, parameter] : parameters) {
    group.parameters.push_back(parameter);
    group.names.push_back(fmt::format("{}.{}", name, own_name));
  }
}

}  // namespace

/// The table of the optimizers that live here.
class Steps::Impl : public std::enable_shared_from_this<Steps::Impl> {
 public:
  Impl(OptimizerTable table, rpc::Registrar& registrar)
      : table_(std::move(table)),
        worker_(registrar.worker().endpoint()->weak_from_this()),
        queue_(registrar.host()) {}

  void create(const CreateOptimizer& message) {
    auto owned = std::make_shared<Owned>();
    std::vector<Group> groups;
    for (const OptimizerGroup& part : message.groups) {
      Group& group = groups.emplace_back(std::vector<at::Tensor>(), part.recipe);
      group.label = part.label;
      group.hogwild = part.hogwild;
      for (const OptimizerTarget& target : part.targets) {
        if (!target.value) throw Error(ErrorKind::kInvalid, "a target is an empty RRef");
        // Ready: messages wait for their references.
        owned->values.push_back(target.value->value(Deadline::never()));
        list_parameters(*owned->values.back(), target.name, group);
      }
    }
    owned->optimizer = std::make_unique<Optimizer>(std::move(groups), &table_);
    for (const at::Tensor& parameter : owned->optimizer->parameters()) {
      owned->keys.insert(parameter.unsafeGetTensorImpl());
    }
    owned->keys.insert(owned.get());  // steps of single parameters run one after the other too
    MutexLock lock(mutex_);
    optimizers_[message.id] = std::move(owned);
  }

  Future<Unit> step(const StepOptimizer& message) {
    auto owned = find(message.id);
    return queue_.run(owned->keys, [this, owned, message] { step_now(*owned->optimizer, message); });
  }

  /// Nothing to do where the forward passes of the context did not come by: no gradient will.
  void step_in_backward(const StepInBackward& message) {
    const auto context = find_context(message.context);
    if (!context) return;
    context->offer_gradients(
        [weak = weak_from_this(), owner = std::weak_ptr<Owned>(find(message.id)), rates = message.rates](
            const at::Tensor& parameter, at::Tensor& gradient) -> std::optional<Future<void>> {
          const auto self = weak.lock();
          const auto owned = owner.lock();
          if (!self || !owned || !owned->keys.contains(parameter.unsafeGetTensorImpl())) return std::nullopt;
          refuse_shared_gradient(parameter, owned->optimizer->describe(parameter));
          return self->queue_
              .run({parameter.unsafeGetTensorImpl(), owned.get()},
                   [owned, rates, parameter, gradient = std::exchange(gradient, {})] {
                     owned->optimizer->set_lrs(rates);
                     owned->optimizer->step_one(parameter, gradient);
                   })
              .then([](const Future<Unit>& done) { done.wait(); });
        });
  }

  double norm(const NormOfGradients& message) const {
    const auto owned = find(message.id);
    const auto context = find_context(message.context);
    std::vector<at::Tensor> gradients;
    if (context) {
      for (const at::Tensor& parameter : owned->optimizer->parameters()) {
        gradients.push_back(context->gradient(parameter));
      }
    }
    return gradient_norm(gradients, message.norm_type);
  }

  /// What `use` makes of the optimizer while none of its parameters is being stepped.
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

  /// A copy of the state under the rates that the steps would have.
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
  struct Owned {
    std::unique_ptr<Optimizer> optimizer;
    StepQueue::Keys keys;
    std::vector<rpc::ValuePtr> values;  ///< keeps the modules alive
  };

  std::shared_ptr<Owned> find(GlobalId id) const {
    MutexLock lock(mutex_);
    auto it = optimizers_.find(id);
    if (it == optimizers_.end()) {
      throw Error(ErrorKind::kInvalid, fmt::format("optimizer {}:{} does not live on this worker; its "
                                                   "DistributedOptimizer has ended",
                                                   id.worker, id.local));
    }
    return it->second;
  }

  Worker worker() const {
    auto endpoint = worker_.lock();
    if (!endpoint) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return Worker(endpoint);
  }

  /// Empty when no gradient ever came here in that context.
  std::optional<autograd::ContextView> find_context(std::uint64_t id) const {
    return worker().extension<autograd::Passes>().try_find(id);
  }

  void step_now(Optimizer& optimizer, const StepOptimizer& message) const {
    optimizer.set_lrs(message.rates);
    const auto context = find_context(message.context);
    if (!context) return;
    SpanScope span(worker().runtime().spans, SpanKind::kOptimizer, optimizer.rule(0).name());
    optimizer.step([&](const at::Tensor& parameter) {
      const at::Tensor gradient = context->gradient(parameter);
      return gradient.defined() && message.scale != 1 ? gradient.mul(message.scale) : gradient;
    });
  }

  const OptimizerTable table_;
  const std::weak_ptr<rpc::Endpoint> worker_;
  StepQueue queue_;
  mutable Mutex mutex_;
  std::map<GlobalId, std::shared_ptr<Owned>> optimizers_ TORCHSPAN_GUARDED_BY(mutex_);
};

Steps::Steps(OptimizerTable table) : table_(std::move(table)) {}
Steps::~Steps() = default;

void Steps::attach(rpc::Registrar& registrar) {
  impl_ = std::make_shared<Impl>(std::move(table_), registrar);
  std::weak_ptr<Impl> weak = impl_;
  auto impl = [weak] {
    auto alive = weak.lock();
    if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return alive;
  };
  registrar.handle<CreateOptimizer>(rpc::RunOn::kPool,
                                    [impl](const rpc::CallInfo&, const CreateOptimizer& message) {
                                      impl()->create(message);
                                      return Unit{};
                                    });
  registrar.handle<StepOptimizer>(
      rpc::RunOn::kPool,
      [impl](const rpc::CallInfo&, const StepOptimizer& message) { return impl()->step(message); });
  registrar.handle<StepInBackward>(rpc::RunOn::kPool,
                                   [impl](const rpc::CallInfo&, const StepInBackward& message) {
                                     impl()->step_in_backward(message);
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

std::size_t Steps::count() const { return impl_ ? impl_->count() : 0; }

}  // namespace torchspan::optim
