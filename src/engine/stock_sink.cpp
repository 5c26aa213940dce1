#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <torchspan/core/error.h>
#include <torchspan/engine/stock_sink.h>

namespace torchspan::engine {

at::Tensor StockSink::gradient(const at::Tensor& parameter) const {
  MutexLock lock(mutex_);
  return parameter.grad();
}

void StockSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const c10::AutoGradMode grad_mode(false);
  MutexLock lock(mutex_);
  at::Tensor& field = parameter.mutable_grad();
  torch::autograd::AccumulateGrad::accumulateGrad(parameter, field, gradient, /*num_expected_refs=*/1,
                                                  [&](at::Tensor&& sum) { field = std::move(sum); });
}

void StockSink::replace(const at::Tensor& parameter, at::Tensor gradient) {
  MutexLock lock(mutex_);
  parameter.mutable_grad() = std::move(gradient);
}

/// Owned by the engine's callback queue, which runs it when the pass succeeds and destroys it in any case.
class StockPasses::Ending {
 public:
  Ending(std::shared_ptr<StockPasses> passes, const void* task, std::shared_ptr<StockSink> sink)
      : passes_(std::move(passes)), task_(task), sink_(std::move(sink)) {}
  ~Ending() {
    if (completed_) return;
    passes_->forget(task_);
    sink_->end()->end(std::make_exception_ptr(
        Error(ErrorKind::kCancelled,
              "LibTorch's engine gave this backward pass up: see the error that backward() threw")));
  }
  void complete() {
    completed_ = true;
    passes_->forget(task_);
    sink_->end()->end(nullptr);
    sink_->end()->wait();
  }

 private:
  const std::shared_ptr<StockPasses> passes_;
  const void* const task_;
  const std::shared_ptr<StockSink> sink_;  // whoever held the end off may still use it
  bool completed_ = false;
};

std::shared_ptr<StockSink> StockPasses::current() {
  // The address of a member of the task that the engine runs on this thread: unique as long as the task
  // lives.
  const void* task = torch::autograd::get_current_graph_task_exec_info();
  if (!task) {
    throw Error(ErrorKind::kInvalid, "no backward pass of LibTorch's engine is running on this thread");
  }
  std::shared_ptr<StockSink> sink;
  {
    MutexLock lock(mutex_);
    auto& known = sinks_[task];
    if (known) return known;
    known = std::make_shared<StockSink>(next_pass_++);
    sink = known;
  }
  auto ending = std::make_shared<Ending>(shared_from_this(), task, sink);
  torch::autograd::Engine::get_default_engine().queue_callback([ending] { ending->complete(); });
  return sink;
}

void StockPasses::forget(const void* task) {
  std::shared_ptr<StockSink> dropped;
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
