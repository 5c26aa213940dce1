#include <fmt/format.h>
#include <map>

#include <torch/nn/module.h>

#include <torchspan/autograd/passes.h>
#include <torchspan/optim/steps.h>
#include <torchspan/rpc/worker.h>

#include "optim/messages.h"
#include "optim/parameters.h"
#include "optim/step_queue.h"

namespace torchspan::optim {
namespace {

/// The parameters of a value that lives here: a tensor itself, or those of a module.
void list_parameters(rpc::Value& value, std::vector<at::Tensor>& parameters) {
  const std::size_t before = parameters.size();
  if (value.type() == typeid(at::Tensor)) {
    parameters.push_back(*static_cast<at::Tensor*>(value.address()));
  } else if (auto* module = value.object<torch::nn::Module>()) {
    for (at::Tensor& parameter : parameters_of(*module)) parameters.push_back(std::move(parameter));
  } else {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a target is a '{}', which is neither a module nor a tensor; give the "
                            "optimizer RRefs of modules or of parameters",
                            value.type_name()));
  }
  if (parameters.size() == before) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a target of type '{}' has no parameters", value.type_name()));
  }
}

}  // namespace

/// The table of the optimizers that live here.
class Steps::Impl {
 public:
  Impl(OptimizerTable table, rpc::Registrar& registrar)
      : table_(std::move(table)),
        worker_(registrar.worker().endpoint()->weak_from_this()),
        queue_(registrar.host()) {}

  void create(const CreateOptimizer& message) {
    auto owned = std::make_shared<Owned>();
    std::vector<at::Tensor> parameters;
    for (const auto& target : message.targets) {
      if (!target) throw Error(ErrorKind::kInvalid, "a target is an empty RRef");
      owned->values.push_back(target->value(Deadline::never()));  // ready: messages wait for their references
      list_parameters(*owned->values.back(), parameters);
    }
    for (const at::Tensor& parameter : parameters) owned->keys.insert(parameter.unsafeGetTensorImpl());
    owned->optimizer = table_.build(message.recipe, std::move(parameters));
    MutexLock lock(mutex_);
    optimizers_[message.id] = std::move(owned);
  }

  Future<Unit> step(const StepOptimizer& message) {
    auto owned = find(message.id);
    return queue_.run(owned->keys, [this, owned, context = message.context] { step_now(*owned, context); });
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
    std::unique_ptr<FunctionalOptimizer> optimizer;
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

  void step_now(Owned& owned, std::uint64_t context_id) const {
    auto endpoint = worker_.lock();
    if (!endpoint) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    const Worker worker(endpoint);
    const auto context = worker.extension<autograd::Passes>().try_find(context_id);
    if (!context) return;  // no gradient ever came here in that context
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : owned.optimizer->parameters()) {
      gradients.push_back(context->gradient(parameter));
    }
    SpanScope span(worker.runtime().spans, SpanKind::kOptimizer, owned.optimizer->name());
    owned.optimizer->step(gradients);
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
  registrar.handle<DropOptimizer>(rpc::RunOn::kPool,
                                  [impl](const rpc::CallInfo&, const DropOptimizer& message) {
                                    impl()->drop(message.id);
                                    return Unit{};
                                  });
}

std::size_t Steps::count() const { return impl_ ? impl_->count() : 0; }

}  // namespace torchspan::optim
