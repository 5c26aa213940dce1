#pragma once
// Training that continues when ranks die, in the processes of the other ranks: docs/elastic.md. Includes no torch/nn.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/core/time.h>
#include <torchspan/data.h>
#include <torchspan/data_parallel.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/elastic/training.h>

namespace torchspan {

/// Progress of a training run: that of its committed steps.
using ElasticPosition = DataPosition;

struct ElasticOptions {
  std::int64_t samples = 0;  ///< size of the data set; required
  /// Samples in each step; required. The last step of an epoch uses what is left.
  std::int64_t batch = 0;
  /// Whether `batch` counts the samples of each rank, so that a step with fewer ranks uses fewer samples. False: those
  /// of all ranks together, so that the remaining ranks take over the share of a missing one.
  bool batch_per_rank = false;
  std::uint64_t seed = 0;      ///< of the order of samples in each epoch
  ElasticPosition start = {};  ///< of the state that rank 0 begins with, such as that of a checkpoint
  int min_ranks = 1;           ///< with fewer ranks, training waits for replacements
  Duration too_few_limit = std::chrono::minutes(10);  ///< the longest such wait; run() then throws kTimedOut
  /// How long ranks wait for a late rank, such as a stopped process, before they continue without it. Must exceed the
  /// longest step and the time to copy the state to a new rank. A rank that was left out joins again.
  Duration step_timeout = std::chrono::minutes(2);
  collective::GroupOptions group = {};  ///< backend, network and device
  data_parallel::DataParallelOptions data_parallel = {};
  std::string name = "trainer";  ///< of one trainer of a program only; the same on all ranks

  /// Throws Error{kInvalid} that names the wrong field.
  void validate() const;
};

/// One rank's part of one step, which `number` committed steps precede. Its rank is that in the current group, not the
/// worker's.
struct ElasticStep : DataStep {
  std::uint64_t generation = 0;  ///< counts the groups
};

/// Trains a module on all ranks, data-parallel, and continues when ranks die. A step is committed on all ranks or on
/// none: `body` computes the averaged gradients, the ranks vote, and `apply` runs once per committed step. After a
/// death the remaining ranks repeat an uncommitted step without the dead rank. A worker that replaces a dead one gets
/// the state between two steps. Rank 0 cannot be replaced. Use it from one thread; one object per name and process.
template <class Module>
class ElasticTrainer {
 public:
  using Model = DistributedDataParallel<Module>;

  /// Not collective. `session` must outlive this object. Throws Error{kInvalid} that names a wrong option.
  template <class S>
  ElasticTrainer(S& session, Module module, ElasticOptions options)
      : module_(std::move(module)),
        options_(options.data_parallel),
        training_(
            session.worker(),
            [&session](collective::GroupOptions group) { return session.group(std::move(group)); },
            data_parallel::pointer_to(module_), std::move(options)) {
    options_.initial_sync = false;  // the trainer copies the state
    training_.add("module", checkpoint::source_of(module_));
  }

  /// Registers an object that `apply` changes: an optimizer, a scheduler, a number (checkpoint.h lists the
  /// types). Joining ranks get its state. It must outlive the trainer. The same names in the same order on all ranks.
  template <class T>
  void add(std::string name, T& object) {
    training_.add(std::move(name), checkpoint::source_of(object));
  }

  /// Trains until `steps` steps are committed. `body(model, step)` runs forward and backward; it may run again for the
  /// same step and changes nothing but gradients and buffers. `apply(step)` updates the parameters from `.grad`. Returns
  /// true once all ranks have the final state, false if the others had finished before this rank joined. Throws what
  /// `body` or `apply` throws here, and the other ranks continue; kDisconnected if rank 0 died; kTimedOut below
  /// min_ranks.
  template <class Body, class Apply>
  bool run(std::int64_t steps, Body body, Apply apply) {
    return training_.run(steps, {.wrap =
                                     [this](const collective::Group& group) {
                                       model_ = std::make_unique<Model>(module_, group, options_);
                                     },
                                 .unwrap = [this] { model_.reset(); },
                                 .group = [this] { return model_ ? &model_->reducer().group() : nullptr; },
                                 .body = [this, &body](const ElasticStep& step) { body(*model_, step); },
                                 .apply = [&apply](const ElasticStep& step) { apply(step); }});
  }

  /// What this rank has applied; after run() the same on all ranks.
  const ElasticPosition& position() const { return training_.position(); }
  Module& module() { return module_; }

 private:
  Module module_;
  data_parallel::DataParallelOptions options_;
  std::unique_ptr<Model> model_;
  elastic::Training training_;
};

struct RecoveryOptions {
  /// Of the CheckpointManager. `directory` is required; `participants` must be empty. Its `timeout` is also the limit of
  /// each wait for a late rank here, and so must exceed the time between two checkpoints.
  CheckpointOptions checkpoint;
  std::int64_t steps_per_checkpoint = 100;
  /// Copies the state of each rank into the memory of the next rank every so many steps; 0: never. A rank then has
  /// twice its own state in memory and twice that of the rank before it.
  std::int64_t steps_per_copy = 0;
  /// How long the ranks wait for a replacement of a dead rank, or for a stopped process of this host to continue,
  /// before run() throws.
  Duration replacement_limit = std::chrono::minutes(10);

  /// Throws Error{kInvalid} that names the wrong field.
  void validate() const;
};

/// How many times the objects of a training run were created again, and where its state came from.
struct RecoveryReport {
  int rebuilds = 0;          ///< times the objects were created again in this process
  int from_copies = 0;       ///< times the state came from memory
  int from_checkpoints = 0;  ///< times the state came from a checkpoint
};

/// Where the objects of a program register their state each time they are created. See RecoveringTrainer.
class RecoveryState {
 public:
  /// Registers an object whose state is restored and saved: a pipeline, an optimizer, a number (checkpoint.h
  /// lists the types). It must exist as long as the object that the registering function returns.
  template <class T>
  void add(const std::string& name, T& object) {
    manager_.add(name, object);
    if (copy_) copy_(name, checkpoint::source_of(object));
  }
  /// The same for an object whose state differs between ranks.
  template <class T>
  void add_per_rank(const std::string& name, T& object) {
    manager_.add_per_rank(name, object);
    if (copy_) copy_(name, checkpoint::source_of(object));
  }

 private:
  friend class RecoveringTrainer;
  using Copy = std::function<void(const std::string&, checkpoint::SourcePtr)>;
  RecoveryState(CheckpointManager& manager, Copy copy) : manager_(manager), copy_(std::move(copy)) {}

  CheckpointManager& manager_;
  const Copy copy_;
};

/// Trains a model that is divided over ranks (a pipeline, remote modules) and continues in the same processes when
/// ranks die or are stopped for a while: creates the program's objects again together with the replacement, restores
/// the newest state that all ranks have, from memory or from a checkpoint, and repeats the steps since then. Rank 0
/// cannot be replaced. Use it from one thread.
class RecoveringTrainer {
 public:
  /// Not collective. `session` must outlive this object. Throws Error{kInvalid} that names a wrong option.
  template <class S>
  RecoveringTrainer(S& session, RecoveryOptions options)
      : RecoveringTrainer(
            session.worker(),
            [&session](collective::GroupOptions group) { return session.group(std::move(group)); },
            std::move(options)) {}
  ~RecoveringTrainer();
  RecoveringTrainer(const RecoveringTrainer&) = delete;

  /// Trains until `steps` steps are done. `make(RecoveryState&)` creates the objects, registers their state, and returns
  /// a pointer to an object with step(std::int64_t number) that owns them. It runs again after each death; all ranks
  /// call run(). Throws what `make` or a step throws unless a rank died or is stopped; kDisconnected if rank 0 died,
  /// kTimedOut if a replacement does not come or a process stays stopped.
  template <class Make>
  void run(std::int64_t steps, Make make) {
    run_steps(steps, [&make](RecoveryState& state) -> Step {
      using Pointer = std::invoke_result_t<Make&, RecoveryState&>;
      return [objects = std::make_shared<Pointer>(make(state))](std::int64_t number) {
        (*objects)->step(number);
      };
    });
  }
  /// The counts of run() so far.
  const RecoveryReport& report() const;

 private:
  using MakeGroup = std::function<collective::Group(collective::GroupOptions)>;
  using Step = std::function<void(std::int64_t)>;
  using MakeStep = std::function<Step(RecoveryState&)>;
  class Impl;

  RecoveringTrainer(const Worker& worker, MakeGroup make_group, RecoveryOptions options);
  void run_steps(std::int64_t steps, const MakeStep& make);

  const ProcessOwned<Impl> impl_;
};

}  // namespace torchspan
