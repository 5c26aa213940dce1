#pragma once
// DistributedDataParallel and what belongs to it. SyncBatchNorm is in data_parallel/sync_batch_norm.h, local SGD in
// data_parallel/local_sgd.h. Includes no torch/nn.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/collective.h>
#include <torchspan/data_parallel/local_sgd.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/data_parallel/output_tensors.h>
#include <torchspan/detail/data_parallel/wrapped_module.h>

namespace torchspan {
namespace data_parallel {

/// Finds the tensors in the result of a module's forward. Specialize it for your type: `static void
/// visit(T& value, auto& visitor)` calls visit_tensors(member, visitor) for each member that may hold
/// tensors. A missed tensor fails the backward pass, or its gradients stay local. Tensors, numbers, strings
/// and standard containers, tuples, optionals, variants and shared pointers of them have one.
template <class T>
struct OutputTensors;

}  // namespace data_parallel

/// Data-parallel wrapper of a module, given as a holder such as `torch::nn::Linear` or a shared_ptr.
/// Parameters and buffers start as rank 0's. When a backward over an output of the wrapper returns, every
/// rank holds the same averaged gradients. Names in checkpoints are those of the wrapped module. Not
/// thread-safe: use it from the training thread.
template <class Module>
class DistributedDataParallel {
 public:
  /// Collective. Throws Error{kInvalid} on every rank, naming the parameter, if models or options differ
  /// (data_parallel/reducer.h). After the session of `group` has ended, forwards fail with kCancelled.
  DistributedDataParallel(Module module, collective::Group group,
                          data_parallel::DataParallelOptions options = {})
      : module_(std::move(module)),
        wrapped_(std::make_shared<data_parallel::WrappedModule>(data_parallel::pointer_to(module_),
                                                                std::move(group), std::move(options))) {}

  /// Runs the module's forward and returns its result by value; data_parallel::OutputTensors finds the
  /// tensors in it. Under NoGradGuard it sends nothing, so ranks may call it independently. If it throws on
  /// one rank, the backward passes of the other ranks fail with its reason.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) {
    try {
      wrapped_->begin_forward();
      auto result = module_->forward(std::forward<Inputs>(inputs)...);
      std::vector<at::Tensor> outputs;
      auto collect = [&](at::Tensor& tensor) { outputs.push_back(tensor); };
      data_parallel::visit_tensors(result, collect);
      outputs = wrapped_->end_forward(std::move(outputs));
      std::size_t next = 0;
      auto replace = [&](at::Tensor& tensor) { tensor = std::move(outputs[next++]); };
      data_parallel::visit_tensors(result, replace);
      return result;
    } catch (...) {
      wrapped_->forward_failed();
      throw;
    }
  }
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }

  /// While it lives, forwards belong to passes that accumulate gradients locally and send nothing. The
  /// first reduced pass afterwards averages the sums.
  using NoSync = data_parallel::NoSync<data_parallel::WrappedModule>;
  [[nodiscard]] NoSync no_sync() { return NoSync(wrapped_); }

  /// Runs `body`, a loop over batches, on ranks with different numbers of batches. A rank whose body has
  /// returned takes part in the others' reductions with zeros. At the end all ranks get the parameters and
  /// buffers of the last one. Every forward with gradients and every reduction inside costs one small
  /// all-reduce. An exception from `body`, or a failed forward, ends the join on all ranks.
  template <class Body>
  void join(Body&& body, data_parallel::JoinOptions options = {}) {
    wrapped_->join(std::forward<Body>(body), options);
  }

  /// Reduces buckets with `hook` (data_parallel/reducer.h) instead of averaging them. Collective, before the
  /// first backward; `name` must be the same on all ranks.
  void register_comm_hook(data_parallel::CommHook hook, std::string name) {
    wrapped_->register_comm_hook(std::move(hook), std::move(name));
  }
  /// Combines buffers with `hook` instead of broadcasting rank 0's. Collective, at most once; `name` and
  /// `when` must be the same on all ranks. Not inside join(), nor with broadcast_buffers = false.
  void set_buffer_hook(data_parallel::BufferHook hook, std::string name,
                       data_parallel::BufferHookTime when = data_parallel::BufferHookTime::kAfterForward) {
    wrapped_->set_buffer_hook(std::move(hook), std::move(name), when);
  }
  /// Collective: whether `ok` is true on all ranks; if not, skip the step. Call it in each step, on all ranks after
  /// the loss or after backward, with false where an exception was caught. Backward passes of the other ranks that
  /// wait for this one fail at once, and the next step works. Not inside join().
  [[nodiscard]] bool agree(bool ok) { return wrapped_->agree(ok); }
  /// Broadcasts parameters and buffers from `root`, for example after it loaded a checkpoint. Collective.
  void synchronize_state(int root = 0) { wrapped_->synchronize_state(root); }

  Module& module() { return module_; }
  const Module& module() const { return module_; }
  data_parallel::ReducerStats stats() const { return wrapped_->reducer().stats(); }
  const data_parallel::Reducer& reducer() const { return wrapped_->reducer(); }
  /// For objects that take part in the reductions, such as ZeroRedundancyOptimizer.
  const std::shared_ptr<data_parallel::WrappedModule>& wrapped() const { return wrapped_; }

 private:
  Module module_;
  std::shared_ptr<data_parallel::WrappedModule> wrapped_;
};

}  // namespace torchspan

namespace torch::nn {
class Module;
}

namespace torchspan {

/// Makes every batch norm in `module` normalize over the batches of all ranks of `group`; returns their
/// number. Collective; call it before DistributedDataParallel. A batch norm in a torch::nn::Sequential is
/// replaced by a SyncBatchNorm with the same tensors, and an existing SyncBatchNorm gets the group. A batch
/// norm that is a class member cannot be replaced: Error{kInvalid} names it; declare it as SyncBatchNorm
/// (data_parallel/sync_batch_norm.h). Throws Error{kInvalid} on all ranks if modules differ, leaving them
/// unchanged.
std::size_t convert_sync_batch_norm(torch::nn::Module& module, const collective::Group& group);

}  // namespace torchspan
