#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/schedule/schedule.h>

/// A model's layers spread over workers, micro-batches flowing through them. This room is not built yet: what
/// follows is the interface it is meant to have. Including it is harmless; making a pipeline stops the
/// compilation and says so.
namespace torchspan::pipeline {

template <class Use>
struct Built {
  static_assert(!std::is_same_v<Use, Use>, "torchspan::pipeline is not built yet: see docs/status.md");
  using Yes = int;
};
template <class Use>
using NotBuilt = typename Built<Use>::Yes;

/// What decides the next task of a stage: the order of arrival, or a table of torchspan::schedule.
enum class Schedule : std::uint8_t {
  kArrival,
  kGPipe,
  kOneFOneB,
  kInterleaved,
  kLoopedBreadthFirst,
  kZeroBubble,
  kZeroBubbleV,
  kDualPipeV,
  kTable,  ///< PipelineOptions::table
};

/// Which micro-batches keep only their inputs and are computed again for their backward.
enum class Checkpoint : std::uint8_t { kNever, kExceptLast, kAlways };

struct PipelineOptions {
  std::vector<int> balance;          ///< distinct layers of each stage; empty: by measured time
  std::vector<std::string> workers;  ///< who owns each stage; empty: ranks in order
  int micro_batches = 1;
  Schedule schedule = Schedule::kOneFOneB;
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  schedule::Table table;        ///< for Schedule::kTable
  int most_in_flight = 0;       ///< micro-batches a stage may hold; 0: what the schedule needs
  bool split_backward = false;  ///< weight gradients as tasks of their own
};

/// Where a layer lives: the stage, and its place among the stage's layers.
struct Location {
  int stage = 0;
  int index = 0;
};

/// One use of a layer in the order of the model. A layer may be used many times, also from different stages;
/// it has one owner and one set of parameters.
struct Invocation {
  int order = 0;
  Location here;
  Location source;
  Location destination;
};

/// A list of layers, each described by its class and constructor arguments and built on its owner only.
class Layers {
 public:
  /// Appends a layer; the returned number appends it again elsewhere through `again`.
  template <class Module, class... Args, NotBuilt<Module> = 0>
  int add(Args&&... args);
  template <class Use = void, NotBuilt<Use> = 0>
  void again(int layer);
};

/// The loss of an output and its target: a scalar, the mean over the micro-batch.
using Loss = std::function<at::Tensor(at::Tensor output, at::Tensor target)>;

/// Splits each batch into micro-batches and drives them through the stages' owners. Results and gradients
/// equal those of the plain model, up to the order of floating-point sums. A stage that fails or dies ends
/// the step on all stages with one Error that names it. A world of one is a plain loop. To be used by the
/// thread that trains.
class Pipeline {
 public:
  /// Collective: every worker makes it with the same layers and options. `session` is a torchspan::Session.
  template <class Session, NotBuilt<Session> = 0>
  Pipeline(Session& session, Layers layers, PipelineOptions options = {});

  /// Forward, loss and backward of one batch; gradients land in the owners' parameters. Returns the mean
  /// loss, on every worker. `loss` runs on the last stage. The last micro-batch may
  /// be smaller.
  template <class Use = void, NotBuilt<Use> = 0>
  at::Tensor train_step(at::Tensor input, at::Tensor target, Loss loss);
  /// Forward only, without gradients; the output, on every worker.
  template <class Use = void, NotBuilt<Use> = 0>
  at::Tensor infer(at::Tensor input);
  /// The order of layer uses that this pipeline follows.
  template <class Use = void, NotBuilt<Use> = 0>
  std::vector<Invocation> plan() const;
};

}  // namespace torchspan::pipeline
