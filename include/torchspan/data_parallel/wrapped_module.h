#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/runtime.h>

namespace torch::nn {
class Module;
}

namespace torchspan::data_parallel {

struct JoinOptions {
  /// Divides sums by the number of all ranks, also when some have run out of batches; else by the number of
  /// those that have not.
  bool divide_by_initial_world_size = true;
  /// Throws on all ranks as soon as one has run out, instead of letting it shadow the others.
  bool throw_on_early_termination = false;
};

/// What DistributedDataParallel is, whatever the module's type: parameters and buffers in step with the other
/// ranks, forwards prepared for their reduction. To be used by the thread that trains.
class WrappedModule {
 public:
  /// Collective; see Reducer. Besides, every rank gets rank 0's parameters and buffers. The module may be
  /// shared, but its parameters must stay the same tensors.
  WrappedModule(Runtime& runtime, std::shared_ptr<torch::nn::Module> module, collective::Group group,
                DataParallelOptions options);
  ~WrappedModule();
  WrappedModule(const WrappedModule&) = delete;

  /// Before and after the module's forward; the second gives stand-ins for its output tensors.
  void begin_forward();
  std::vector<at::Tensor> end_forward(std::vector<at::Tensor> outputs);
  /// While an exception of the forward, between the two or out of them, is handled: tells the other ranks,
  /// whose backward passes then fail. Throws nothing.
  void forward_failed() noexcept;

  /// What the next forwards are to do; returns what they did before.
  bool set_synchronize(bool synchronize);
  void register_comm_hook(CommHook hook, std::string name);
  void set_buffer_hook(BufferHook hook, std::string name, BufferHookTime when);
  void join(const std::function<void()>& body, const JoinOptions& options);
  /// Collective: everybody gets the parameters and buffers of `root`.
  void synchronize_state(int root);

  const Reducer& reducer() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::data_parallel
