#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/data_parallel/hooks.h>
#include <torchspan/data_parallel/options.h>
#include <torchspan/data_parallel/stats.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan::data_parallel {

/// What the ranks of a join() tell each other before a reduction.
struct RoundTerms {
  double divisor = 0;  ///< as in ForwardOptions
  int leader = 0;
};

/// What one forward says about the backward passes that follow it.
struct ForwardOptions {
  bool synchronize = true;                 ///< false: gradients accumulate on this rank
  double divisor = 0;                      ///< of the sum over ranks; 0: their number. The same on all ranks
  int leader = 0;                          ///< a rank that takes part with gradients. The same on all ranks
  std::vector<Future<void>> awaited = {};  ///< what its first reduced backward pass does not end before
  std::function<RoundTerms()> announce =
      nullptr;  ///< called before each reduction; what it throws fails the pass
};

/// Averages the gradients of parameters over the ranks of a group while backward still runs: puts them into
/// buckets and reduces a bucket when its last gradient has come, in one order on all ranks. Speaks to an
/// engine::GradientSink, so it works over `.grad` under LibTorch's engine and over an autograd context alike.
///
/// Every step: begin_forward(), the model, prepare_for_backward() on its outputs, backward from what that
/// returned. When backward returns, gradients are the same bits on all ranks. A pass that leaves parameters
/// out fails and names them. All ranks' passes succeed or none: one that fails here, in the module or outside
/// of it, fails the others' with an error that tells why; gradients are then void, and the next step works
/// again. A group that broke stays broken. To be used by one thread at a time; hooks may run on others.
class Reducer {
 public:
  using Replicas = std::vector<std::vector<Parameter>>;

  /// Collective. Fails on every rank alike, with Error{kInvalid} naming the parameter, when ranks differ in
  /// names, order, dtypes, shapes, strides, sparseness, requires_grad or options, and when one rank's
  /// arguments are wrong. Parameters that need no gradient are compared and left alone. `runtime` must
  /// outlive the reducer, or be that of the session that made `group`: what uses that may outlive it, and
  /// fails with kCancelled then. Several replicas in one process: gradients are summed over them, and
  /// averaged over ranks.
  Reducer(Runtime& runtime, std::vector<Parameter> parameters, collective::Group group,
          DataParallelOptions options = {});
  Reducer(Runtime& runtime, Replicas replicas, collective::Group group, DataParallelOptions options = {});
  /// Takes its hooks off the parameters; a reduction that is under way is given up.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// A forward begins. When an exception took the last one's outputs before backward came through them, the
  /// others, who are in their backward, are told first.
  void begin_forward();
  /// Call with every output tensor of a forward; backward must go through what it returns, which stands for
  /// the same values. Waits for a reduction that another rank is still finishing. Collective only in the
  /// sense that all ranks do their reduced forwards in one order and equally often: a reduction between ranks
  /// that have done different numbers of them fails on all.
  std::vector<at::Tensor> prepare_for_backward(std::vector<at::Tensor> outputs, ForwardOptions options = {});

  /// Collective, once, before the first reduction: buckets go through `hook`; `name` must be the same on all
  /// ranks.
  void register_comm_hook(CommHook hook, std::string name);

  /// Takes part in one reduction of the others with nothing of its own; gradients here stay as they are.
  void shadow(ForwardOptions options = {});
  /// The same for a forward that no backward pass will follow here: the others' passes fail, and tell
  /// `reason`. Returns at once; settle() waits.
  void refuse(ForwardOptions options, const std::string& reason);
  /// Collective in sense: from here on all ranks have done equally many reduced forwards.
  void restart_count();

  /// Waits for the end of a reduction that was given up here and that other ranks may still be in: call it
  /// before you use group(). A forward does so by itself.
  void settle();
  /// How many reductions have begun here.
  std::uint64_t rounds() const;

  ReducerStats stats() const;
  /// The group of its own that this reducer's traffic goes through.
  const collective::Group& group() const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::data_parallel
