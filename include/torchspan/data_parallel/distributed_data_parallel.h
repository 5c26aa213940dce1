#pragma once
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/data_parallel/output_tensors.h>
#include <torchspan/data_parallel/wrapped_module.h>

namespace torchspan {

/// Wraps a module (a holder such as `torch::nn::Linear`, or a shared_ptr to a module) whose replicas live on
/// the ranks of a group: their parameters and buffers start as those of rank 0, and when backward over an
/// output of the wrapper returns, every rank holds the same averaged gradients. Names in checkpoints are the
/// module's own. To be used by the thread that trains.
template <class Module>
class DistributedDataParallel {
 public:
  /// Collective. Throws Error{kInvalid} on every rank, with the parameter's name, when models or options
  /// differ (data_parallel/reducer.h). `runtime` must outlive the wrapper, unless it is that of the session
  /// that made `group`: then forwards fail with kCancelled once the session ended.
  DistributedDataParallel(Runtime& runtime, Module module, collective::Group group,
                          data_parallel::DataParallelOptions options = {})
      : module_(std::move(module)),
        wrapped_(std::make_unique<data_parallel::WrappedModule>(runtime, pointer(module_), std::move(group),
                                                                std::move(options))) {}

  /// Runs the module's forward. Returns what it returns, by value; its tensors are found through
  /// data_parallel::OutputTensors. Under no-grad nothing is sent, so ranks may do that each for itself. When
  /// it throws on one rank, the others' backward passes fail and tell why.
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

  /// Forwards while it lives belong to passes that add to this rank's gradients and send nothing; the first
  /// reduced pass after it averages the sums.
  class NoSync {
   public:
    explicit NoSync(data_parallel::WrappedModule& wrapped)
        : wrapped_(wrapped), before_(wrapped.set_synchronize(false)) {}
    ~NoSync() { wrapped_.set_synchronize(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    data_parallel::WrappedModule& wrapped_;
    const bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*wrapped_); }

  /// Runs `body`, a loop over batches of which ranks may have different numbers: a rank whose body has
  /// returned shadows the others' reductions until the last one has; then all get that one's parameters and
  /// buffers. Each reduced or accumulating forward inside, and each reduction, costs one small all-reduce. A
  /// body that throws ends the join on all ranks, as does what a forward says of it.
  template <class Body>
  void join(Body&& body, data_parallel::JoinOptions options = {}) {
    wrapped_->join(std::forward<Body>(body), options);
  }

  /// Collective, before the first backward: buckets go through `hook` (data_parallel/hooks.h) instead of an
  /// average. `name` must be the same on all ranks.
  void register_comm_hook(data_parallel::CommHook hook, std::string name) {
    wrapped_->register_comm_hook(std::move(hook), std::move(name));
  }
  /// Collective, once: buffers go through `hook` instead of being taken from rank 0. `name` and `when` must
  /// be the same on all ranks. Not inside join(), and not where broadcast_buffers is false.
  void set_buffer_hook(data_parallel::BufferHook hook, std::string name,
                       data_parallel::BufferHookTime when = data_parallel::BufferHookTime::kAfterForward) {
    wrapped_->set_buffer_hook(std::move(hook), std::move(name), when);
  }
  /// Collective: everybody gets the parameters and buffers of `root`, as after loading a checkpoint there.
  void synchronize_state(int root = 0) { wrapped_->synchronize_state(root); }

  Module& module() { return module_; }
  const Module& module() const { return module_; }
  data_parallel::ReducerStats stats() const { return wrapped_->reducer().stats(); }
  const data_parallel::Reducer& reducer() const { return wrapped_->reducer(); }

 private:
  static std::shared_ptr<torch::nn::Module> pointer(const Module& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      static_assert(std::is_convertible_v<Module, std::shared_ptr<torch::nn::Module>>,
                    "give a module holder or a std::shared_ptr to a module");
      return module;
    }
  }

  Module module_;
  std::unique_ptr<data_parallel::WrappedModule> wrapped_;
};

}  // namespace torchspan
