#pragma once
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/checkpoint/state.h>
#include <torchspan/rpc/rref.h>
#include <torchspan/state/source.h>

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
                  "a checkpoint cannot save a T: add a StateSource for it (checkpoint/state.h)");
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
