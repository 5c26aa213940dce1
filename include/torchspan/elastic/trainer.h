#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <torchspan/data_parallel/distributed_data_parallel.h>
#include <torchspan/detail/elastic/training.h>

namespace torchspan {

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
            pointer(module_), std::move(options)) {
    options_.initial_sync = false;  // the trainer copies the state
    training_.add("module", checkpoint::source_of(module_));
  }

  /// Registers an object that `apply` changes: an optimizer, a scheduler, a number (checkpoint/sources.h lists the
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
  static std::shared_ptr<torch::nn::Module> pointer(const Module& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }

  Module module_;
  data_parallel::DataParallelOptions options_;
  std::unique_ptr<Model> model_;
  elastic::Training training_;
};

}  // namespace torchspan
