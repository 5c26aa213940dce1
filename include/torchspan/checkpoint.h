#pragma once
// CheckpointManager, which saves and restores the state of all ranks; the sources of that state; model folders and
// safetensors files. Includes no torch/nn.
#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/time.h>
#include <torchspan/rpc/rref.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/state/source.h>

/// The interface through which objects list their state, under the names that programs use.
namespace torchspan::checkpoint {

using state::RemoteValue;
using state::SourcePtr;
using state::StateReader;
using state::StateSource;
using state::StateTensor;
using state::StateWriter;
using state::Value;

}  // namespace torchspan::checkpoint

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class LRScheduler;
class Optimizer;
}  // namespace optim
namespace serialize {
class InputArchive;
class OutputArchive;
}  // namespace serialize
}  // namespace torch

/// Adapters from the objects of a program to StateSource. Those that take a reference hold it.
namespace torchspan::checkpoint {

using state::module_source;
/// The serialized optimizer, as one tensor of bytes, and its learning rates.
SourcePtr torch_optimizer_source(torch::optim::Optimizer& optimizer);
/// The number of steps of LibTorch's StepLR and other schedules whose rates depend only on their constructor's
/// arguments and the optimizer, which must be registered, too.
SourcePtr torch_schedule_source(torch::optim::LRScheduler& schedule);
/// A module or tensor on another worker, which writes and reads it.
SourcePtr remote_source(RemoteValue value);
/// The value that the variable refers to at each save() and restore().
SourcePtr rref_source(const RRefBase& variable);
/// This tensor, which restoring changes in place.
SourcePtr tensor_source(at::Tensor tensor);
/// The tensor that the variable has at each save() and restore().
SourcePtr tensor_variable_source(at::Tensor& variable);
SourcePtr value_source(std::function<Value()> get, std::function<void(const Value&)> set);
SourcePtr state_dict_source(std::function<state::StateDict()> get,
                            std::function<void(const state::StateDict&)> set);
SourcePtr archive_source(std::function<void(torch::serialize::OutputArchive&)> save,
                         std::function<void(torch::serialize::InputArchive&)> load);
/// The states of LibTorch's default generators: of the CPU and of each CUDA device.
SourcePtr rng_source();

namespace detail {
template <class T>
concept ModuleHolder = requires(const T& holder) {
  typename T::ContainedType;
  holder.ptr();
};
template <class T>
concept WrapsModule = requires(T& wrapper) {
  wrapper.module();
};
template <class T>
concept HasStateDict = requires(T& object, const state::StateDict& state) {
  { object.state_dict() } -> std::convertible_to<state::StateDict>;
  object.load_state_dict(state);
};
template <class T>
concept ProvidesSource = requires(T& object) {
  { object.state_source() } -> std::same_as<SourcePtr>;
};
template <class T>
concept Archived = requires(T& object, torch::serialize::OutputArchive& out,
                            torch::serialize::InputArchive& in) {
  object.save(out);
  object.load(in);
};
using state::value_as;
}  // namespace detail

/// Selects the adapter: objects with a state_source() (optimizers, pipelines, ZeroRedundancyOptimizer), modules (also their
/// holders, shared_ptr, DistributedDataParallel, RRefs), any object with state_dict() and load_state_dict(StateDict)
/// (LRScheduler, GradScaler) or with save() and load() over archives (data samplers), LibTorch's optimizers and schedules,
/// tensors, numbers, flags and strings.
template <class T>
SourcePtr source_of(T& object) {
  if constexpr (detail::ProvidesSource<T>) {
    return object.state_source();
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return tensor_variable_source(object);
  } else if constexpr (detail::ModuleHolder<T>) {
    return module_source(object.ptr());
  } else if constexpr (std::is_convertible_v<T&, std::shared_ptr<torch::nn::Module>>) {
    return module_source(object);
  } else if constexpr (std::is_base_of_v<RRefBase, T>) {
    return rref_source(object);
  } else if constexpr (detail::WrapsModule<T>) {
    return source_of(object.module());
  } else if constexpr (std::is_base_of_v<torch::optim::Optimizer, T>) {
    return torch_optimizer_source(object);
  } else if constexpr (detail::HasStateDict<T>) {
    return state_dict_source([&object] { return object.state_dict(); },
                             [&object](const state::StateDict& state) { object.load_state_dict(state); });
  } else if constexpr (std::is_base_of_v<torch::optim::LRScheduler, T>) {
    return torch_schedule_source(object);
  } else if constexpr (std::is_base_of_v<torch::nn::Module, T>) {
    return module_source(static_cast<torch::nn::Module&>(object));
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string> ||
                       std::is_floating_point_v<T> || std::is_integral_v<T>) {
    using Stored = std::conditional_t<std::is_same_v<T, bool> || std::is_same_v<T, std::string>, T,
                                      std::conditional_t<std::is_floating_point_v<T>, double, std::int64_t>>;
    return value_source(
        [&object] { return Value(static_cast<Stored>(object)); },
        [&object](const Value& value) { object = static_cast<T>(detail::value_as<Stored>(value)); });
  } else {
    static_assert(detail::Archived<T>,
                  "a checkpoint cannot save a T: add a StateSource for it (state/source.h)");
    return archive_source([&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
                          [&object](torch::serialize::InputArchive& archive) { object.load(archive); });
  }
}

template <class T>
[[deprecated("use source_of()")]] SourcePtr pipeline_source(T& pipeline) {
  return source_of(pipeline);
}
template <class T>
[[deprecated("use source_of()")]] SourcePtr optimizer_source(T& optimizer) {
  return source_of(optimizer);
}
template <class T>
[[deprecated("use source_of()")]] SourcePtr distributed_optimizer_source(T& optimizer) {
  return source_of(optimizer);
}
template <class T>
[[deprecated("use source_of()")]] SourcePtr functional_source(T& optimizer) {
  return source_of(optimizer);
}
template <class T>
[[deprecated("use Pipeline::parameter_names()")]] std::vector<std::string> parameter_names(
    const T& pipeline) {
  return pipeline.parameter_names();
}

}  // namespace torchspan::checkpoint

namespace torchspan {

struct CheckpointOptions {
  /// Folder of the checkpoints, on a file system that all ranks share; required. It is created if missing.
  std::string directory;
  int keep_last = 3;            ///< number of newest checkpoints to keep; at least 1
  int keep_best = 0;            ///< number of checkpoints with the best metric to keep in addition
  bool lower_is_better = true;  ///< of SaveOptions::metric
  /// save() returns once the state is copied, and a thread writes the copy. Otherwise it returns when the
  /// checkpoint is complete, and copies nothing.
  bool asynchronous = true;
  bool rng = true;  ///< also saves the states of LibTorch's default generators of every rank
  /// Names of the workers that have this manager; empty: all. The one with the lowest rank commits.
  std::vector<std::string> participants = {};
  std::string name = "manager";  ///< unique among the managers of one set of workers
  /// Limit of each wait for the other ranks. A rank that writes slowly counts as late, too. 0: no limit.
  Duration timeout = std::chrono::minutes(30);
};

struct SaveOptions {
  std::optional<double> metric = {};  ///< for CheckpointOptions::keep_best; the committing rank's counts
};

/// Saves and restores the registered objects of all ranks as one checkpoint, which exists for all ranks or for
/// none. Every participant registers its objects under the same names and calls save() and restore() in the same
/// order, from one thread. Replicas (same name, same shape) are written once. Registered objects must outlive
/// the manager. See docs/checkpoints.md.
class CheckpointManager {
 public:
  CheckpointManager(const Worker& worker, CheckpointOptions options);
  /// For a program of one process without a session.
  explicit CheckpointManager(CheckpointOptions options);
  /// Waits until the last save() is complete; logs its failure.
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  /// Registers an object that is replicated, or that this rank has a part of (checkpoint::source_of() lists
  /// the types). Its names in the checkpoint begin with `name`.
  template <class T>
  void add(std::string name, T& object) {
    add_source(std::move(name), checkpoint::source_of(object));
  }
  /// Registers an object whose state differs between ranks, such as a data sampler. It can be restored only by as many
  /// ranks as saved it. For a DistributedOptimizer this is add(), which saves the state of each trainer, and which any number
  /// of ranks restores: a new trainer gets a copy of another one's state, and a warning.
  template <class T>
  void add_per_rank(const std::string& name, T& object) {
    add_source_per_rank(name, checkpoint::source_of(object));
  }
  /// Registers any other state. Throws Error{kInvalid} if the name is taken, or begins with the name and a dot of an
  /// object that owns the names below its own (StateSource::owns_names()), or the reverse.
  void add_source(std::string name, checkpoint::SourcePtr source);
  void add_source_per_rank(const std::string& name, checkpoint::SourcePtr source);

  /// Saves the state after `step` steps. If the previous asynchronous save failed, throws its error instead,
  /// on all ranks. Throws Error{kInvalid} on all ranks if they disagree about the step or a value.
  void save(std::int64_t step, SaveOptions options = {});
  /// Returns when the last save() is a checkpoint; throws if it failed.
  void wait();

  /// Restores the newest checkpoint whose checksums match, and returns its step; nullopt if there is none.
  /// Logs a warning for each newer one that is damaged. Throws on all ranks if an object does not fit, or if
  /// all checkpoints are damaged.
  std::optional<std::int64_t> restore();
  /// The same, or returns `first_step` if there is no checkpoint.
  std::int64_t restore_or(std::int64_t first_step) { return restore().value_or(first_step); }

  class Impl;

 private:
  const ProcessOwned<Impl> impl_;
};

/// A complete checkpoint, for programs that inspect, export or serve it in one process. Reads the folder of a
/// step, written by any number of ranks. Cheap to copy; not thread-safe.
class Checkpoint {
 public:
  /// Checks the manifest and the sizes and headers of all files; Error{kInvalid} names what is damaged.
  explicit Checkpoint(std::string folder);
  /// The newest checkpoint in a directory whose checksums match. Throws Error{kInvalid} if there is none.
  static Checkpoint newest(const std::string& directory);
  /// Folders of the checkpoints in a directory, newest first; not checked.
  static std::vector<std::string> list(const std::string& directory);

  const std::string& folder() const { return folder_; }
  std::int64_t step() const;
  /// Number of ranks that saved it.
  int world_size() const;
  std::optional<double> metric() const;
  /// Checks the checksums of all data; throws Error{kInvalid} that names tensor and file.
  void verify() const;

  std::vector<std::string> names() const;
  /// A whole tensor; shards are put together. Shares memory with no other tensor. See StateReader::read().
  at::Tensor read(const std::string& name) const;
  const std::map<std::string, checkpoint::Value>& values() const;
  /// Restores an object that was saved under `name`: checkpoint.load("model", net).
  template <class T>
  void load(const std::string& name, T& object) const {
    load_source(name, *checkpoint::source_of(object));
  }
  void load_source(const std::string& name, checkpoint::StateSource& source) const;

 private:
  struct Content;
  std::string folder_;
  std::shared_ptr<Content> content_;
};

}  // namespace torchspan

namespace torch::nn {
class Module;
}

namespace torchspan::checkpoint {

/// Tensors by name.
using NamedTensors = std::map<std::string, at::Tensor>;

struct SaveModelOptions {
  std::uint64_t max_file_bytes = std::uint64_t{5} << 30;  ///< of one file's data; a larger tensor has its own
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

/// Writes parameters and buffers as the Hugging Face libraries do: "model.safetensors", or numbered files and
/// "model.safetensors.index.json". A tensor with several names is written under the first one. Replaces a model that
/// the folder has: a reader finds the old model, none, or the new one. Not collective: call it on one rank.
void save_model(const torch::nn::Module& module, const std::string& folder, SaveModelOptions options = {});

struct LoadModelOptions {
  /// Name in the folder of each parameter and buffer; empty: its name in the module.
  std::function<std::string(const std::string& name)> saved_name = {};
  bool allow_missing = false;     ///< leaves tensors that the folder lacks unchanged
  bool allow_unexpected = false;  ///< ignores tensors that the module lacks
  bool cast = false;              ///< converts other dtypes
};

/// Loads parameters and buffers by name from such a folder, or from one safetensors file. All names, shapes and
/// dtypes are checked before the first tensor changes; Error{kInvalid} names the tensors that do not fit.
void load_model(torch::nn::Module& module, const std::string& path, LoadModelOptions options = {});

/// Writes one safetensors file, replacing it at once. Tensors are stored contiguously.
void save_safetensors(const std::string& file, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata = {});
/// Reads all tensors of a safetensors file or of a model folder. Each has memory that nothing else uses: a mapping of
/// its part of the file, or a copy. Writes to it do not reach the file.
NamedTensors load_safetensors(const std::string& path);

}  // namespace torchspan::checkpoint

namespace torchspan {
using checkpoint::load_model;
using checkpoint::LoadModelOptions;
using checkpoint::save_model;
using checkpoint::SaveModelOptions;
}  // namespace torchspan
