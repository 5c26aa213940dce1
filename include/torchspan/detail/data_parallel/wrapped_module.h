#pragma once
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/runtime.h>

namespace torch::nn {
class Module;
}

namespace torchspan::data_parallel {

/// Callbacks of an optimizer that steps and gathers the parameters of a WrappedModule. Empty ones are skipped.
struct OptimizerHooks {
  std::function<void()> before_forward;    ///< of the module, also without gradients
  std::function<void()> before_broadcast;  ///< of the parameters
  /// In join(), on a rank without batches: after each reduction that it takes part in. True: the reduction succeeded,
  /// and the other ranks step or clear the gradients next. False: it failed on all ranks.
  std::function<void(bool reduced)> after_shadow;
  /// In join(), if the body throws on this rank, or if its part in the others' reductions fails after the body
  /// returned: called with the text of the exception, before the other ranks are notified.
  std::function<void(const std::string& reason)> body_failed;
  /// In join(), on a rank that has a batch: before it begins a forward with gradients or a reduction. An exception
  /// prevents that; it must be thrown on all such ranks.
  std::function<void()> before_round;
  /// In join(), on a rank whose body has returned: before it takes part in the other ranks' reductions.
  std::function<void()> body_ended;
};

/// The module that a holder or a std::shared_ptr points to.
template <typename Module>
std::shared_ptr<torch::nn::Module> pointer_to(const Module& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    static_assert(std::is_convertible_v<Module, std::shared_ptr<torch::nn::Module>>,
                  "give a module holder or a std::shared_ptr to a module");
    return module;
  }
}

/// Type-independent part of DistributedDataParallel: keeps parameters and buffers in sync with the other
/// ranks and prepares forwards for their reduction. Use it from the training thread.
class WrappedModule {
 public:
  /// Collective; see Reducer. Broadcasts rank 0's parameters and buffers. The module may be shared, but its
  /// parameters must remain the same tensors.
  WrappedModule(std::shared_ptr<torch::nn::Module> module, collective::Group group,
                DataParallelOptions options);
  ~WrappedModule();
  WrappedModule(const WrappedModule&) = delete;

  /// Call them before and after the module's forward; end_forward() returns stand-ins for the output
  /// tensors.
  void begin_forward();
  std::vector<at::Tensor> end_forward(std::vector<at::Tensor> outputs);
  /// Call it while handling an exception from begin_forward(), the module's forward or end_forward().
  /// Notifies the other ranks, whose backward passes then fail.
  void forward_failed() noexcept;

  /// Later forwards do not reduce gradients until resume_reductions() was called as often.
  void pause_reductions();
  void resume_reductions();
  void register_comm_hook(CommHook hook, std::string name);
  void set_buffer_hook(BufferHook hook, std::string name, BufferHookTime when);
  void join(const std::function<void()>& body, const JoinOptions& options);
  bool agree(bool ok);
  /// Broadcasts parameters and buffers from `root`. Collective.
  void synchronize_state(int root);

  const std::shared_ptr<torch::nn::Module>& module() const;
  const Reducer& reducer() const;
  /// The parameters that the reducer averages, in the module's order.
  std::vector<Parameter> parameters() const;
  /// As Reducer::keep_buckets().
  void keep_buckets();
  void set_optimizer_hooks(OptimizerHooks hooks);
  /// In join(): how many ranks had no batch in the last reduction. 0 before the first one, and outside.
  int ranks_without_batches() const;

 private:
  class Impl;
  ProcessOwned<Impl> impl_;
};

}  // namespace torchspan::data_parallel
