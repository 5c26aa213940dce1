#include "optim/state_sources.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/accumulate.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer.h>

#include "state/api/save_load.h"

namespace torchspan::optim {
namespace {

/// "group.0.parameter.weight" of "group.0.parameter.weight.exp_avg".
std::string entry_owner(const std::string& name) {
  return name.substr(0, std::min(name.rfind('.'), name.size()));
}

struct OwnedParameter {
  std::string owner;  ///< as entry_owner() of its entries
  at::Tensor tensor;
};

std::vector<OwnedParameter> owned_parameters(const Optimizer& optimizer) {
  const std::vector<at::Tensor> parameters = optimizer.parameters();
  const std::vector<std::string> names = optimizer.state_names();
  std::vector<OwnedParameter> owned;
  for (std::size_t i = 0; i < parameters.size(); ++i) owned.push_back({names[i], parameters[i]});
  return owned;
}

/// What belongs to elements of a parameter is where the parameter is. Restores the parameters that this rank has; other ranks
/// may have saved more.
class OptimizerSource final : public state::StateSource {
 public:
  explicit OptimizerSource(Optimizer& optimizer) : optimizer_(optimizer) {}

  void save(state::StateWriter& writer) const override {
    const StateDict state = optimizer_.state_view();
    const std::map<std::string, Owned> places = places_by_owner();
    for (const auto& item : state) {
      const auto owned = places.find(entry_owner(item.key()));
      if (owned == places.end()) {
        writer.add(item.key(), item.value());
        continue;
      }
      const auto& [place, sizes] = owned->second;
      if (place->own || is_elementwise(item.key(), item.value(), owned->second)) {
        state::save_at_place(writer, item.key(), item.value(), place);
      } else if (place->count() > 0 ||
                 c10::multiply_integers(place->shape) == 0) {  // else other ranks save it
        require_not_divided(item, *place);
        writer.add(item.key(), item.value());
      }
    }
  }

  void load(const state::StateReader& reader) override {
    std::set<std::string> mine;
    const StateDict now = optimizer_.state_view();
    for (const auto& entry : now) mine.insert(entry_owner(entry.key()));
    const std::map<std::string, Owned> places = places_by_owner();
    const std::multimap<std::string, std::string> copies = copies_without_state(reader);
    StateDict state;
    for (const std::string& saved : reader.names()) {
      const std::optional<std::string> without_rank = state::name_of_any_rank(saved);
      const bool is_own = without_rank && mine.contains(entry_owner(*without_rank));
      const std::string& name = is_own ? *without_rank : saved;
      const auto owned = places.find(entry_owner(name));
      if (!mine.contains(entry_owner(name))) continue;
      const bool has_place = owned != places.end();
      if (state::saved_name(reader, name, has_place ? owned->second.place : nullptr) == saved)
        state.insert(name, has_place ? loaded(reader, saved, owned->second) : reader.read(saved));
      const auto [copy, last] = copies.equal_range(entry_owner(name));
      for (auto one = copy; one != last; ++one) {
        const at::Tensor* value = state.find(name);
        const std::string copied = one->second + name.substr(one->first.size());
        if (value != nullptr && state.find(copied) == nullptr) state.insert(copied, value->clone());
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

  /// Copies of parameters, by those that they are copies of, which the checkpoint knows under one name: they were on
  /// different ranks, and are now on one.
  std::multimap<std::string, std::string> copies_without_state(const state::StateReader& reader) const {
    std::set<std::string> saved;
    for (const std::string& name : reader.names()) saved.insert(entry_owner(name));
    const std::vector<OwnedParameter> all = owned_parameters(optimizer_);
    std::multimap<std::string, std::string> copies;
    for (const auto& [owner, parameter] : all) {
      const state::PlacePtr place = state::place_of(parameter);
      if (!place || !place->same_as.defined() || saved.contains(owner)) continue;
      for (const auto& other : all) {
        if (other.tensor.is_same(place->same_as)) copies.emplace(other.owner, owner);
      }
    }
    return copies;
  }

  std::map<std::string, Owned> places_by_owner() const {
    std::map<std::string, Owned> places;
    for (const auto& [owner, parameter] : owned_parameters(optimizer_)) {
      const state::PlacePtr place = state::place_of(parameter);
      if (!place || (!place->divided && !place->own)) continue;
      places.emplace(owner, Owned{place, state::elements_of(parameter, place).sizes()});
    }
    return places;
  }

  static bool is_step(const std::string& key) { return key.ends_with(".step"); }
  static bool is_elementwise(const std::string& key, const at::Tensor& value, const Owned& owned) {
    return owned.place->divided && !is_step(key) && value.sizes() == owned.sizes;
  }

  /// Ranks would take a state of each other's elements for replicas of one.
  static void require_not_divided(const StateDict::Item& item, const state::Place& place) {
    const bool divided = place.count() < c10::multiply_integers(place.shape);
    if (!divided || is_step(item.key()) || item.value().numel() == 1) return;
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the optimizer's state '{}' cannot be saved in parts, because it does not have "
                            "one number for each "
                            "element of its parameter: complex parameters cannot be divided then",
                            item.key()));
  }

  static at::Tensor loaded(const state::StateReader& reader, const std::string& saved, const Owned& owned) {
    const state::Place& place = *owned.place;
    if (place.own || is_step(saved) || reader.shape(saved) != place.shape) return reader.read(saved);
    const at::Tensor elements = at::empty(owned.sizes, reader.dtype_of(reader.full_name(saved)));
    state::load_at_place(reader, saved, elements, owned.place);
    return elements;
  }

  Optimizer& optimizer_;
};

/// Several trainers may have optimizers of the same parameters: the names are the same, and the states differ.
class DistributedOptimizerSource final : public state::StateSource {
 public:
  explicit DistributedOptimizerSource(DistributedOptimizer& optimizer) : optimizer_(optimizer) {}

  void save(state::StateWriter& writer) const override {
    for (const RRef<StateDict>& shard : optimizer_.state_shards()) writer.add_remote("", shard.state());
  }
  void load(const state::StateReader& reader) override {
    StateDict state;
    for (const std::string& name : reader.names()) state.insert(name, reader.read(name));
    optimizer_.load_state_dict(state);
  }
  bool is_of_rank() const override { return true; }

 private:
  DistributedOptimizer& optimizer_;
};

class FunctionalSource final : public state::StateSource {
 public:
  explicit FunctionalSource(FunctionalOptimizer& optimizer) : optimizer_(optimizer) {}

  void save(state::StateWriter& writer) const override {
    writer.add("lr", at::scalar_tensor(optimizer_.lr(), at::kDouble));
    for (std::size_t i = 0; i < count(); ++i) {
      for (const auto& [name, tensor] : optimizer_.state(i)) writer.add(prefix(i) + name, tensor);
    }
  }
  /// All states are read before the first is set, and put back if one of them does not match.
  void load(const state::StateReader& reader) override {
    const auto rate = reader.read("lr").item<double>();
    const std::vector<ParameterState> states = states_in(reader);
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
    return static_cast<const FunctionalOptimizer&>(optimizer_).parameters().size();
  }
  static std::string prefix(std::size_t index) { return fmt::format("parameter.{}.", index); }
  std::vector<ParameterState> states_in(const state::StateReader& reader) const {
    const std::vector<std::string> names = reader.names();
    std::vector<ParameterState> states(count());
    for (std::size_t i = 0; i < states.size(); ++i) {
      for (const std::string& name : names) {
        if (name.starts_with(prefix(i))) states[i].emplace(name.substr(prefix(i).size()), reader.read(name));
      }
    }
    return states;
  }

  FunctionalOptimizer& optimizer_;
};

}  // namespace

state::SourcePtr source_of(Optimizer& optimizer) { return std::make_unique<OptimizerSource>(optimizer); }
state::SourcePtr source_of(DistributedOptimizer& optimizer) {
  return std::make_unique<DistributedOptimizerSource>(optimizer);
}
state::SourcePtr source_of(FunctionalOptimizer& optimizer) {
  return std::make_unique<FunctionalSource>(optimizer);
}

}  // namespace torchspan::optim
