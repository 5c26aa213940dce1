#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/accumulate.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/error.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/functional.h>

#include "checkpoint/files/checksum.h"
#include "checkpoint/sources/placed.h"
#include "checkpoint/state/torch_types.h"
#include "optim/api/entry_name.h"
#include "optim/api/load_exactly.h"

namespace torchspan::checkpoint {
namespace {

void save_entries(StateWriter& writer, const optim::StateDict& state) {
  for (const auto& entry : state) writer.add(entry.key(), entry.value());
}

/// "group.0.parameter.weight" of "group.0.parameter.weight.exp_avg".
std::string entry_owner(const std::string& name) {
  return name.substr(0, std::min(name.rfind('.'), name.size()));
}

/// What belongs to elements of a parameter is where the parameter is. Restores the parameters that this rank has; other ranks
/// may have saved more.
class OptimizerSource final : public StateSource {
 public:
  explicit OptimizerSource(optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void save(StateWriter& writer) const override {
    const optim::StateDict state = optimizer_.state_view();
    const std::map<std::string, Owned> places = places_by_owner(state);
    for (const auto& item : state) {
      const auto owned = places.find(entry_owner(item.key()));
      if (owned == places.end()) {
        writer.add(item.key(), item.value());
        continue;
      }
      const auto& [place, sizes] = owned->second;
      if (place->own || is_elementwise(item.key(), item.value(), owned->second)) {
        save_at_place(writer, item.key(), item.value(), place);
      } else if (place->count() > 0 ||
                 c10::multiply_integers(place->shape) == 0) {  // else other ranks save it
        require_not_divided(item, *place);
        writer.add(item.key(), item.value());
      }
    }
  }

  void load(const StateReader& reader) override {
    std::set<std::string> mine;
    const optim::StateDict now = optimizer_.state_view();
    for (const auto& entry : now) mine.insert(entry_owner(entry.key()));
    const std::map<std::string, Owned> places = places_by_owner(now);
    optim::StateDict state;
    for (const std::string& saved : reader.names()) {
      const std::optional<std::string> without_rank = name_of_any_rank(saved);
      const bool is_own = without_rank && mine.contains(entry_owner(*without_rank));
      const std::string& name = is_own ? *without_rank : saved;
      const auto owned = places.find(entry_owner(name));
      if (!mine.contains(entry_owner(name)) || (is_own && owned == places.end())) continue;
      if (owned == places.end()) {
        state.insert(name, reader.read(saved));
      } else if (saved_name(reader, name, owned->second.place) == saved) {
        state.insert(name, loaded(reader, saved, owned->second));
      }
    }
    for (const auto& [owner, owned] : places) {
      // A rank without elements of a parameter may keep a placeholder that no other optimizer has.
      if (owned.place->divided && owned.place->count() == 0 && state.find(owner + ".step") == nullptr)
        state.insert(owner + ".step", at::scalar_tensor(0, at::kLong));
    }
    optimizer_.load_state_dict(state);
  }

 private:
  /// A parameter with a place.
  struct Owned {
    state::PlacePtr place;
    at::IntArrayRef sizes;  ///< of this rank's elements
  };

  std::map<std::string, Owned> places_by_owner(const optim::StateDict& state) const {
    std::map<std::string, Owned> places;
    for (const auto& [owner, parameter] : optim::owned_parameters(optimizer_, state)) {
      const state::PlacePtr placed = state::place_of(parameter);
      if (!placed || (!placed->divided && !placed->own)) continue;
      const at::IntArrayRef sizes = placed->elements.defined() ? placed->elements.sizes() : parameter.sizes();
      auto place = std::make_shared<state::Place>(*placed);
      place->elements = at::Tensor();  // those of the parameter
      places.emplace(owner, Owned{std::move(place), sizes});
    }
    return places;
  }

  static bool is_step(const std::string& key) { return key.ends_with(".step"); }
  static bool is_elementwise(const std::string& key, const at::Tensor& value, const Owned& owned) {
    return owned.place->divided && !is_step(key) && value.sizes() == owned.sizes;
  }

  /// Ranks would take a state of each other's elements for replicas of one.
  static void require_not_divided(const optim::StateDict::Item& item, const state::Place& place) {
    const bool divided = place.count() < c10::multiply_integers(place.shape);
    if (!divided || is_step(item.key()) || item.value().numel() == 1) return;
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the optimizer's state '{}' cannot be saved in parts, because it does not have "
                            "one number for each "
                            "element of its parameter: complex parameters cannot be divided then",
                            item.key()));
  }

  static at::Tensor loaded(const StateReader& reader, const std::string& saved, const Owned& owned) {
    const state::Place& place = *owned.place;
    if (place.own || is_step(saved) || reader.shape(saved) != place.shape) return reader.read(saved);
    const at::Tensor elements = at::empty(owned.sizes, reader.dtype_of(reader.full_name(saved)));
    load_at_place(reader, saved, elements, owned.place);
    return elements;
  }

  optim::Optimizer& optimizer_;
};

class StateDictSource final : public StateSource {
 public:
  StateDictSource(std::function<optim::StateDict()> get, std::function<void(const optim::StateDict&)> set)
      : get_(std::move(get)), set_(std::move(set)) {}

  void save(StateWriter& writer) const override { save_entries(writer, get_()); }
  void load(const StateReader& reader) override {
    optim::StateDict state;
    // Clones: `set_` may keep the tensors, and a mapping would keep the file on the disk after it was deleted.
    for (const std::string& name : reader.names()) state.insert(name, reader.read(name).clone());
    set_(state);
  }

 private:
  const std::function<optim::StateDict()> get_;
  const std::function<void(const optim::StateDict&)> set_;
};

class DistributedOptimizerSource final : public StateSource {
 public:
  explicit DistributedOptimizerSource(optim::DistributedOptimizer& optimizer) : optimizer_(optimizer) {}

  void save(StateWriter& writer) const override {
    for (const RRef<optim::StateDict>& shard : optimizer_.state_shards())
      writer.add_remote("", shard.state());
  }
  void load(const StateReader& reader) override {
    optim::StateDict state;
    for (const std::string& name : reader.names()) state.insert(name, reader.read(name));
    optimizer_.load_state_dict(state);
  }

 private:
  optim::DistributedOptimizer& optimizer_;
};

class FunctionalSource final : public StateSource {
 public:
  explicit FunctionalSource(optim::FunctionalOptimizer& optimizer) : optimizer_(optimizer) {}

  void save(StateWriter& writer) const override {
    writer.add("lr", at::scalar_tensor(optimizer_.lr(), at::kDouble));
    for (std::size_t i = 0; i < count(); ++i) {
      for (const auto& [name, tensor] : optimizer_.state(i)) writer.add(prefix(i) + name, tensor);
    }
  }
  /// All states are read before the first is set, and put back if one of them does not match.
  void load(const StateReader& reader) override {
    const auto rate = reader.read("lr").item<double>();
    const std::vector<optim::ParameterState> states = states_in(reader);
    std::vector<std::function<void()>> undo;
    try {
      for (std::size_t i = 0; i < states.size(); ++i) {
        undo.emplace_back([this, i, old = optimizer_.state(i)] { optimizer_.load_state(i, old); });
        optimizer_.load_state(i, states[i]);
      }
      if (!std::isnan(rate)) optimizer_.set_lr(rate);
    } catch (...) {
      for (const auto& put_back : undo) put_back();
      throw;
    }
  }

 private:
  std::size_t count() const {
    return static_cast<const optim::FunctionalOptimizer&>(optimizer_).parameters().size();
  }
  static std::string prefix(std::size_t index) { return fmt::format("parameter.{}.", index); }
  std::vector<optim::ParameterState> states_in(const StateReader& reader) const {
    const std::vector<std::string> names = reader.names();
    std::vector<optim::ParameterState> states(count());
    for (std::size_t i = 0; i < states.size(); ++i) {
      for (const std::string& name : names) {
        if (name.starts_with(prefix(i))) states[i].emplace(name.substr(prefix(i).size()), reader.read(name));
      }
    }
    return states;
  }

  optim::FunctionalOptimizer& optimizer_;
};

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
                   optim::load_exactly(optimizer, archive);
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

SourcePtr optimizer_source(optim::Optimizer& optimizer) {
  return std::make_unique<OptimizerSource>(optimizer);
}

SourcePtr torch_optimizer_source(torch::optim::Optimizer& optimizer) {
  return std::make_unique<TorchOptimizerSource>(optimizer);
}

SourcePtr torch_schedule_source(torch::optim::LRScheduler& schedule) {
  return value_source([&schedule] { return Value(static_cast<std::int64_t>(StepCount::of(schedule))); },
                      [&schedule](const Value& value) {
                        const auto steps = detail::value_as<std::int64_t>(value);
                        if (steps < 0 || steps > std::numeric_limits<unsigned>::max())
                          throw_invalid(fmt::format("{} is not a number of steps", steps));
                        StepCount::of(schedule) = static_cast<unsigned>(steps);
                      });
}

SourcePtr distributed_optimizer_source(optim::DistributedOptimizer& optimizer) {
  return std::make_unique<DistributedOptimizerSource>(optimizer);
}

SourcePtr functional_source(optim::FunctionalOptimizer& optimizer) {
  return std::make_unique<FunctionalSource>(optimizer);
}

SourcePtr state_dict_source(std::function<optim::StateDict()> get,
                            std::function<void(const optim::StateDict&)> set) {
  return std::make_unique<StateDictSource>(std::move(get), std::move(set));
}

SourcePtr archive_source(std::function<void(torch::serialize::OutputArchive&)> save,
                         std::function<void(torch::serialize::InputArchive&)> load) {
  return std::make_unique<ArchiveSource>(std::move(save), std::move(load));
}

}  // namespace torchspan::checkpoint
