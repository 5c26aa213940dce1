#pragma once
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/collective.h>
#include <torchspan/core/future.h>

/// The same model on every rank, gradients averaged while backward still runs. This room is not built yet:
/// what follows is the interface it is meant to have. Including it is harmless; wrapping a model stops the
/// compilation and says so.
namespace torchspan::data_parallel {

template <class Use>
struct Built {
  static_assert(!std::is_same_v<Use, Use>, "torchspan::data_parallel is not built yet: see docs/status.md");
  using Yes = int;
};
template <class Use>
using NotBuilt = typename Built<Use>::Yes;

struct DataParallelOptions {
  std::size_t bucket_cap_mb = 25;  ///< MiB of gradients reduced together
  std::size_t first_bucket_mb = 1;
  bool find_unused_parameters = false;  ///< the graph is walked every step for parameters it does not reach
  bool static_graph = false;  ///< the first step's graph is that of all steps; anything else is an error
  bool gradient_as_bucket_view = true;
  bool broadcast_buffers = true;
  std::vector<std::string> ignored_parameters;  ///< qualified names; the same on all ranks
};

/// One bucket on its way: the flat gradients of some parameters, in the order of `parameters`.
struct GradientBucket {
  std::size_t index = 0;
  at::Tensor buffer;
  std::vector<std::string> parameters;
  bool is_last = false;
};

/// Puts gradients into buckets and reduces a bucket when its last gradient arrives, in the same order on all
/// ranks. Construction compares names, dtypes, shapes, strides and options across ranks and fails on every
/// rank with the name that differs. A backward pass that ends incomplete fails at once and names the
/// parameters; one that was aborted leaves the reducer usable. Speaks to an engine::GradientSink only, so it
/// works over `.grad` and over an autograd context alike.
class Reducer {
 public:
  template <class Parameters, NotBuilt<Parameters> = 0>
  Reducer(Parameters&& named_parameters, collective::Group group, DataParallelOptions options = {});
};

}  // namespace torchspan::data_parallel

namespace torchspan {

/// Wraps a module (a holder or an `nn::Module`) whose replicas live on the ranks of a group: their parameters
/// and buffers start as those of rank 0, and after each backward pass every rank holds the same averaged
/// gradients. A group of one is a no-op. To be used by the thread that trains.
template <class Module>
class DistributedDataParallel {
  static_assert(!std::is_same_v<Module, Module>,
                "torchspan::data_parallel is not built yet: see docs/status.md");

 public:
  DistributedDataParallel(Module module, collective::Group group,
                          data_parallel::DataParallelOptions options = {});

  /// Runs the module's forward; the next backward over its result reduces.
  template <class... Inputs>
  auto forward(Inputs&&... inputs)
      -> decltype(std::declval<Module&>()->forward(std::forward<Inputs>(inputs)...));

  /// While it lives, backward passes add to the gradients and send nothing.
  class NoSync;
  NoSync no_sync();
  /// While it lives, ranks that ran out of batches shadow the others' reductions.
  class Join;
  Join join();
  /// Reduces buckets by `hook` (GradientBucket → Future<at::Tensor>) instead of an average: compression,
  /// local SGD.
  template <class Hook>
  void set_hook(Hook hook);
};

}  // namespace torchspan
