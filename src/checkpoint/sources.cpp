#include <algorithm>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>

#include "checkpoint/files/safetensors.h"
#include "checkpoint/rng_source.h"
#include "checkpoint/state/torch_types.h"
#include "core/api/throw_invalid.h"
#include "state/api/save_load.h"

namespace torchspan::checkpoint {
namespace {

class ValueSource final : public StateSource {
 public:
  ValueSource(std::function<Value()> get, std::function<void(const Value&)> set)
      : get_(std::move(get)), set_(std::move(set)) {}
  void save(StateWriter& writer) const override { writer.add_value("", get_()); }
  void load(const StateReader& reader) override {
    try {
      set_(reader.value(""));
    } catch (const Error& error) {
      throw Error(error.kind(), fmt::format("value '{}': {}", reader.full_name(""), error.message()));
    }
  }

  bool owns_names() const override { return false; }

 private:
  const std::function<Value()> get_;
  const std::function<void(const Value&)> set_;
};

class TensorSource final : public StateSource {
 public:
  explicit TensorSource(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  void save(StateWriter& writer) const override { writer.add("", tensor_); }
  void load(const StateReader& reader) override { reader.read_into("", tensor_); }

  bool owns_names() const override { return false; }

 private:
  const at::Tensor tensor_;
};

class TensorVariableSource final : public StateSource {
 public:
  explicit TensorVariableSource(at::Tensor& variable) : variable_(variable) {}
  void save(StateWriter& writer) const override { writer.add("", variable_); }
  void load(const StateReader& reader) override {
    if (!variable_.defined()) {
      throw_invalid("the tensor '{}' is undefined; assign one of the saved shape before restoring it",
                    reader.full_name(""));
    }
    reader.read_into("", variable_);
  }

  bool owns_names() const override { return false; }

 private:
  at::Tensor& variable_;
};

using state::StateDict;

class StateDictSource final : public StateSource {
 public:
  StateDictSource(std::function<StateDict()> get, std::function<void(const StateDict&)> set)
      : get_(std::move(get)), set_(std::move(set)) {}

  void save(StateWriter& writer) const override {
    for (const auto& entry : get_()) writer.add(entry.key(), entry.value());
  }
  void load(const StateReader& reader) override {
    StateDict state;
    // Clones: `set_` may keep the tensors, and a mapping would keep the file on the disk after it was deleted.
    for (const std::string& name : reader.names()) state.insert(name, reader.read(name).clone());
    set_(state);
  }

 private:
  const std::function<StateDict()> get_;
  const std::function<void(const StateDict&)> set_;
};

class RemoteSource final : public StateSource {
 public:
  explicit RemoteSource(RemoteValue value) : value_(std::move(value)) {}
  void save(StateWriter& writer) const override { writer.add_remote("", value_); }
  void load(const StateReader& reader) override { reader.read_remote("", value_); }

 private:
  const RemoteValue value_;
};

class RRefSource final : public StateSource {
 public:
  explicit RRefSource(const RRefBase& variable) : variable_(variable) {}
  void save(StateWriter& writer) const override { writer.add_remote("", variable_.state()); }
  void load(const StateReader& reader) override { reader.read_remote("", variable_.state()); }

  bool owns_names() const override { return false; }

 private:
  const RRefBase& variable_;
};

}  // namespace

SourcePtr value_source(std::function<Value()> get, std::function<void(const Value&)> set) {
  return std::make_unique<ValueSource>(std::move(get), std::move(set));
}
SourcePtr tensor_source(at::Tensor tensor) { return std::make_unique<TensorSource>(std::move(tensor)); }
SourcePtr tensor_variable_source(at::Tensor& variable) {
  return std::make_unique<TensorVariableSource>(variable);
}
SourcePtr state_dict_source(std::function<StateDict()> get, std::function<void(const StateDict&)> set) {
  return std::make_unique<StateDictSource>(std::move(get), std::move(set));
}
SourcePtr remote_source(RemoteValue value) { return std::make_unique<RemoteSource>(std::move(value)); }
SourcePtr rref_source(const RRefBase& variable) { return std::make_unique<RRefSource>(variable); }

namespace {

/// An object that LibTorch's archives serialize, as one tensor of bytes.
class ArchiveSource final : public StateSource {
 public:
  ArchiveSource(std::function<void(torch::serialize::OutputArchive&)> save,
                std::function<void(torch::serialize::InputArchive&)> load,
                std::function<std::uint64_t()> fingerprint = {})
      : save_(std::move(save)), load_(std::move(load)), fingerprint_(std::move(fingerprint)) {}

  void save(StateWriter& writer) const override {
    torch::serialize::OutputArchive archive;
    save_(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    const std::string text = std::move(stream).str();
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
    std::copy(text.begin(), text.end(), bytes.data_ptr<std::uint8_t>());
    writer.add("archive", bytes, fingerprint_ ? fingerprint_() : 0);
  }
  void load(const StateReader& reader) override {
    const at::Tensor bytes = reader.read("archive").contiguous();
    std::istringstream stream(
        std::string(static_cast<const char*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())));
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    load_(archive);
  }

 private:
  const std::function<void(torch::serialize::OutputArchive&)> save_;
  const std::function<void(torch::serialize::InputArchive&)> load_;
  const std::function<std::uint64_t()> fingerprint_;
};

/// Differs between optimizers of different parameters, whose archives have no names: the first elements of each
/// parameter.
std::uint64_t fingerprint_of(const torch::optim::Optimizer& optimizer) {
  Checksum checksum;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined() || parameter.numel() == 0) continue;
      const at::Tensor some = parameter.detach().flatten().slice(0, 0, 32).cpu().contiguous();
      checksum.add(bytes_of(some));
    }
  }
  return checksum.finish() | 1;
}

/// An optimizer's archive, and its learning rates: LibTorch's load() leaves those unchanged.
class TorchOptimizerSource final : public StateSource {
 public:
  explicit TorchOptimizerSource(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer),
        archive_([&optimizer](torch::serialize::OutputArchive& archive) { optimizer.save(archive); },
                 [&optimizer](torch::serialize::InputArchive& archive) {
                   state::load_exactly(optimizer, archive);
                 },
                 [&optimizer] { return fingerprint_of(optimizer); }) {}

  void save(StateWriter& writer) const override {
    archive_.save(writer);
    for (std::size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
      if (const auto rate = rate_of(optimizer_.param_groups()[i])) writer.add_value(name(i), *rate);
    }
  }
  void load(const StateReader& reader) override {
    archive_.load(reader);
    for (std::size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
      torch::optim::OptimizerParamGroup& group = optimizer_.param_groups()[i];
      if (rate_of(group)) group.options().set_lr(detail::value_as<double>(reader.value(name(i))));
    }
  }

 private:
  static std::string name(std::size_t group) { return fmt::format("lr.{}", group); }
  /// nullopt if the options of a user's optimizer have no rate.
  static std::optional<double> rate_of(const torch::optim::OptimizerParamGroup& group) {
    if (!group.has_options()) return std::nullopt;
    try {
      return group.options().get_lr();
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  torch::optim::Optimizer& optimizer_;
  ArchiveSource archive_;
};

/// Reaches the protected step count of a schedule.
struct StepCount : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& schedule) { return schedule.*(&StepCount::step_count_); }
};

}  // namespace

SourcePtr torch_optimizer_source(torch::optim::Optimizer& optimizer) {
  return std::make_unique<TorchOptimizerSource>(optimizer);
}

SourcePtr torch_schedule_source(torch::optim::LRScheduler& schedule) {
  return value_source([&schedule] { return Value(static_cast<std::int64_t>(StepCount::of(schedule))); },
                      [&schedule](const Value& value) {
                        const auto steps = detail::value_as<std::int64_t>(value);
                        if (steps < 0 || steps > std::numeric_limits<unsigned>::max())
                          throw_invalid("{} is not a number of steps", steps);
                        StepCount::of(schedule) = static_cast<unsigned>(steps);
                      });
}

SourcePtr archive_source(std::function<void(torch::serialize::OutputArchive&)> save,
                         std::function<void(torch::serialize::InputArchive&)> load) {
  return std::make_unique<ArchiveSource>(std::move(save), std::move(load));
}

namespace {

class RngSource final : public StateSource {
 public:
  explicit RngSource(std::vector<device::NamedGenerator> generators) : generators_(std::move(generators)) {}
  void save(StateWriter& writer) const override {
    for (const auto& [device, generator] : generators_) writer.add(device, device::state_of(generator));
  }
  /// All states are read before the first is set.
  void load(const StateReader& reader) override {
    std::vector<at::Tensor> states;
    for (const auto& [device, generator] : generators_)
      states.push_back(reader.has(device) ? reader.read(device) : at::Tensor());
    for (std::size_t i = 0; i < states.size(); ++i) {
      const at::Generator& one = generators_[i].generator;
      if (states[i].defined()) {
        device::set_state(one, states[i]);
        continue;
      }
      ByteWriter place;
      place.put_string(reader.full_name(generators_[i].device));
      place.put(reader.step());
      place.put(device::seed_of(one));
      device::set_seed(one, checksum_of(place.bytes()));
    }
  }
  bool owns_names() const override { return false; }

 private:
  std::vector<device::NamedGenerator> generators_;
};

}  // namespace

SourcePtr rng_source_of(std::vector<device::NamedGenerator> generators) {
  return std::make_unique<RngSource>(std::move(generators));
}

SourcePtr rng_source() { return rng_source_of(device::default_generators()); }

}  // namespace torchspan::checkpoint
