#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <torchspan/checkpoint/manager.h>
#include <torchspan/collective/group.h>

namespace torchspan {

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
  /// Registers an object whose state is restored and saved: a pipeline, an optimizer, a number (checkpoint/sources.h
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
