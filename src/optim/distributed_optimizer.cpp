#include <fmt/format.h>

#include <torch/nn/module.h>

#include <torchspan/optim/distributed_optimizer.h>

#include "optim/messages.h"
#include "optim/parameters.h"

namespace torchspan::optim {

Target::Target(const std::shared_ptr<torch::nn::Module>& module) {
  if (!module) throw Error(ErrorKind::kInvalid, "a target is a null module; construct it first");
  tensors_ = parameters_of(*module);
  if (tensors_.empty()) throw Error(ErrorKind::kInvalid, "a target module has no parameters");
}

DistributedOptimizer::DistributedOptimizer(const Worker& worker, Recipe recipe, std::vector<Target> targets)
    : worker_(worker) {
  if (targets.empty()) throw Error(ErrorKind::kInvalid, "a DistributedOptimizer needs at least one target");
  std::map<std::uint32_t, CreateOptimizer> messages;
  for (const Target& target : targets) {
    if (const auto& reference = target.reference()) {
      messages[reference->owner()].targets.push_back(reference);
      continue;
    }
    if (target.tensors().empty()) throw Error(ErrorKind::kInvalid, "a target is an empty RRef");
    for (const at::Tensor& tensor : target.tensors()) {
      messages[worker_.rank()].targets.push_back(RRef<at::Tensor>(worker_, tensor).state());
    }
  }
  for (auto& [owner, message] : messages) {
    message.id = worker_.endpoint()->next_id();
    message.recipe = recipe;
    optimizers_[owner] = message.id.local;
  }
  try {
    for_each_owner("making the optimizer", [&](std::uint32_t owner) {
      return worker_.request(Destination(owner), messages.at(owner));
    });
  } catch (...) {
    drop();
    throw;
  }
}

DistributedOptimizer::~DistributedOptimizer() { drop(); }

void DistributedOptimizer::drop() {
  for (const auto& [owner, id] : optimizers_) {
    worker_.request(Destination(owner), DropOptimizer{{worker_.rank(), id}});
  }
}

void DistributedOptimizer::step(const autograd::ContextView& context) {
  for_each_owner("the optimizer step", [&](std::uint32_t owner) {
    return worker_.request(Destination(owner),
                           StepOptimizer{{worker_.rank(), optimizers_.at(owner)}, context.id()});
  });
}

void DistributedOptimizer::for_each_owner(const std::string& what,
                                          const std::function<Future<Unit>(std::uint32_t)>& request) {
  std::vector<Future<Unit>> answers;
  for (const auto& [owner, id] : optimizers_) answers.push_back(request(owner));
  std::vector<Error> failures;
  for (const Future<Unit>& answer : answers) {
    try {
      answer.wait();
    } catch (const Error& error) {
      failures.push_back(error);
    }
  }
  if (failures.empty()) return;
  if (failures.size() == 1) throw failures.front();
  std::string text = fmt::format("{} failed on {} of {} workers:", what, failures.size(), answers.size());
  for (const Error& failure : failures)
    text += fmt::format("\n  worker '{}': {}", failure.worker(), failure.message());
  throw Error(failures.front().kind(), text);
}

}  // namespace torchspan::optim
