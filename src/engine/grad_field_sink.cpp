#include "engine/api/grad_field_sink.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

namespace torchspan::engine {

at::Tensor GradFieldSink::gradient(const at::Tensor& parameter) const {
  MutexLock lock(mutex_);
  return parameter.grad();
}

void GradFieldSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const c10::AutoGradMode grad_mode(false);
  MutexLock lock(mutex_);
  at::Tensor& field = parameter.mutable_grad();
  torch::autograd::AccumulateGrad::accumulateGrad(parameter, field, gradient, /*num_expected_refs=*/1,
                                                  [&](at::Tensor&& sum) { field = std::move(sum); });
}

void GradFieldSink::replace(const at::Tensor& parameter, at::Tensor gradient) {
  MutexLock lock(mutex_);
  parameter.mutable_grad() = std::move(gradient);
}

/// Owned by the engine's callback queue, which runs it if the pass succeeds and always destroys it. The ends
/// of two owners must not wait for each other, because ranks may reach them in different orders.
class NativeEnginePasses::Ending {
 public:
  Ending(std::shared_ptr<NativeEnginePasses> passes, const void* task, std::shared_ptr<GradFieldSink> sink)
      : passes_(std::move(passes)), task_(task), sink_(std::move(sink)) {}
  ~Ending() {
    if (!ended_) {
      passes_->forget(task_);
      sink_->end()->end(std::make_exception_ptr(
          Error(ErrorKind::kCancelled,
                "LibTorch's engine abandoned this backward pass: see the error that backward() threw")));
    } else if (!waited_) {  // another owner's failure is being thrown; gradients must not change after that
      try {
        wait();
      } catch (...) {  // backward() throws the first failure
      }
    }
  }
  void end() {
    ended_ = true;
    passes_->forget(task_);
    sink_->end()->end(nullptr);
  }
  void wait() {
    waited_ = true;
    sink_->end()->wait();
  }

 private:
  const std::shared_ptr<NativeEnginePasses> passes_;
  const void* const task_;
  const std::shared_ptr<GradFieldSink> sink_;  // an owner that holds the end may still use it
  bool ended_ = false, waited_ = false;
};

std::shared_ptr<NativeEnginePasses> NativeEnginePasses::united() {
  std::shared_ptr<NativeEnginePasses> at = shared_from_this();
  for (;;) {
    std::shared_ptr<NativeEnginePasses> next;
    {
      MutexLock lock(at->mutex_);
      next = at->successor_;
    }
    if (!next) return at;
    at = std::move(next);
  }
}

void NativeEnginePasses::unite(const std::shared_ptr<NativeEnginePasses>& other) {
  const std::shared_ptr<NativeEnginePasses> mine = united(), theirs = other->united();
  if (mine == theirs) return;
  MutexLock lock(mine->mutex_);
  mine->successor_ = theirs;
}

std::shared_ptr<GradFieldSink> NativeEnginePasses::current() {
  // The address of a member of the task that the engine runs on this thread: unique as long as the task
  // lives.
  const void* task = torch::autograd::get_current_graph_task_exec_info();
  if (!task) {
    throw Error(ErrorKind::kInvalid, "no backward pass of LibTorch's engine is running on this thread");
  }
  if (const auto one = united(); one.get() != this) return one->current();
  std::shared_ptr<GradFieldSink> sink;
  {
    MutexLock lock(mutex_);
    auto& known = sinks_[task];
    if (known) return known;
    known = std::make_shared<GradFieldSink>(next_pass_++);
    sink = known;
  }
  auto ending = std::make_shared<Ending>(shared_from_this(), task, sink);
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([ending, &engine] {
    ending->end();
    engine.queue_callback([ending] { ending->wait(); });
  });
  return sink;
}

void NativeEnginePasses::forget(const void* task) {
  std::shared_ptr<GradFieldSink> dropped;
  MutexLock lock(mutex_);
  auto found = sinks_.find(task);
  if (found == sinks_.end()) return;
  dropped = std::move(found->second);
  sinks_.erase(found);
}

torch::autograd::variable_list GradientHook::operator()(const torch::autograd::variable_list& outputs,
                                                        const torch::autograd::variable_list& inputs) {
  gradient_ready(*passes_->current(), parameter_);
  return outputs;
}

std::vector<GradientHook*> gradient_hooks(const at::Tensor& parameter) {
  std::vector<GradientHook*> found;
  const auto leaf = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!leaf) return found;
  for (const auto& hook : leaf->post_hooks()) {
    if (auto* ours = dynamic_cast<GradientHook*>(hook.get())) found.push_back(ours);
  }
  return found;
}

bool pass_accumulates_at(torch::autograd::Node& leaf) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto found = chosen->find(&leaf);
  return found != chosen->end() && found->second.needed_;
}

torch::autograd::variable_list PassHook::operator()(const torch::autograd::variable_list& gradients) {
  pass_arrives(*passes_->current());
  return gradients;
}

}  // namespace torchspan::engine
