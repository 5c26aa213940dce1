#include "state/api/save_load.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <torchspan/core/error.h>
#include <torchspan/state/source.h>

#include "core/api/throw_invalid.h"

namespace torchspan::state {
namespace {

constexpr const char* kRank = ".rank";

bool is_divided(const PlacePtr& place) { return place && place->divided && !place->own; }

/// A tensor without elements has no boxes: every rank saves it.
bool has_nothing(const Place& place) { return std::ranges::find(place.shape, 0) != place.shape.end(); }

}  // namespace

const at::Tensor& elements_of(const at::Tensor& tensor, const PlacePtr& place) {
  return place && place->elements.defined() ? place->elements : tensor;
}

std::string own_name(const std::string& name, const Place& place) {
  return fmt::format("{}{}{}", name, kRank, place.among.front()->rank());
}

std::optional<std::string> name_of_any_rank(const std::string& name) {
  const std::size_t mark = name.rfind(kRank);
  if (mark == std::string::npos) return std::nullopt;
  const std::string number = name.substr(mark + std::string(kRank).size());
  if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  return name.substr(0, mark);
}

void save_at_place(StateWriter& writer, const std::string& name, const at::Tensor& elements,
                   const PlacePtr& place) {
  if (place && place->own) return writer.add(own_name(name, *place), elements);
  if (!is_divided(place)) return writer.add(name, elements);
  if (has_nothing(*place)) return writer.add(name, elements.view(place->shape));
  for (std::size_t i = 0; i < place->boxes.size(); ++i)
    writer.add_shard(name, box_in(elements, *place, i), place->shape, place->boxes[i].offset);
}

std::optional<std::string> saved_name(const StateReader& reader, const std::string& name,
                                      const PlacePtr& place, bool exchangeable) {
  const bool own = place && place->own;
  if (own && reader.has(own_name(name, *place))) return own_name(name, *place);
  if (reader.has(name)) return name;  // also of a program in which it was equal on all ranks
  if (is_divided(place)) return std::nullopt;
  // The program that saved may have left it to each rank, or will in this one, which has not wrapped its module yet.
  std::vector<std::string> others;
  for (std::string& other : reader.names()) {
    if (name_of_any_rank(other) == name) others.push_back(std::move(other));
  }
  if (others.empty()) return std::nullopt;
  if (others.size() == 1) return others.front();  // of the only rank that saved
  if (exchangeable)
    return others[static_cast<std::size_t>(own ? place->among.front()->rank() : 0) % others.size()];
  const std::string but = own ? fmt::format(", but not by rank {}", place->among.front()->rank())
                              : ", and is not each rank's own in this program";
  throw_invalid(
      "'{}' was saved by each rank for itself ('{}'){}: restore it with the wrapper and as many ranks as "
      "saved it, or read one of these with Checkpoint::read() and assign it",
      reader.full_name(name), fmt::join(others, "', '"), but);
}

void check_at_place(const StateReader& reader, const std::string& saved, const at::Tensor& elements,
                    const PlacePtr& place, bool cast) {
  // The whole tensor, without memory.
  reader.check(saved,
               is_divided(place) ? at::empty(place->shape, elements.options().device(at::kMeta)) : elements,
               cast);
}

void load_at_place(const StateReader& reader, const std::string& saved, const at::Tensor& elements,
                   const PlacePtr& place) {
  const at::ScalarType dtype = reader.dtype_of(reader.full_name(saved));
  if (dtype != elements.scalar_type()) {
    const at::Tensor read = at::empty(elements.sizes(), at::TensorOptions(dtype));
    load_at_place(reader, saved, read, place);
    elements.copy_(read);
  } else if (is_divided(place)) {
    for (std::size_t i = 0; i < place->boxes.size(); ++i)
      reader.read_shard_into(saved, box_in(elements, *place, i), place->boxes[i].offset);
  } else {
    reader.read_into(saved, elements);
  }
}

namespace {

constexpr std::size_t kMostListed = 8;

std::string listed(const std::vector<std::string>& names) {
  const std::size_t shown = std::min(names.size(), kMostListed);
  std::string text = fmt::format("'{}'", fmt::join(names.begin(), names.begin() + shown, "', '"));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

/// What this rank has of a tensor of the module, and the names under which the checkpoint has it.
struct Found {
  at::Tensor elements;
  PlacePtr place;
  std::vector<std::string> names = {};
};

/// Also of values that differ from themselves.
bool have_equal_bytes(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor a = one.contiguous(), b = other.contiguous();
  return a.sizes() == b.sizes() && std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// Throws Error{kInvalid} if the names of a tied tensor have different values: all but one would be lost.
void require_one_value(const StateReader& reader, const Found& tied) {
  if (tied.names.size() < 2) return;
  const at::Tensor first = reader.read(tied.names.front());
  for (std::size_t i = 1; i < tied.names.size(); ++i) {
    const at::Tensor other = reader.read(tied.names[i]);
    const bool same_type = first.scalar_type() == other.scalar_type();
    if (same_type && (have_equal_bytes(first, other) || at::equal(first, other))) continue;
    throw_invalid(
        "'{}' and '{}' are one tensor in this program, but have different values in the checkpoint: load it "
        "into a module in which they are not tied, or remove one of them from the file",
        reader.full_name(tied.names.front()), reader.full_name(tied.names[i]));
  }
}

}  // namespace

void append_module_tensors(std::vector<ModuleTensor>& all, const torch::nn::Module& module,
                           const std::string& prefix) {
  std::map<const c10::TensorImpl*, std::size_t> places;
  for (std::size_t i = 0; i < all.size(); ++i) places.emplace(all[i].tensor.unsafeGetTensorImpl(), i);
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_buffer) {
    if (!tensor.defined()) return;  // an option of the layer left it out
    const auto [place, is_new] = places.emplace(tensor.unsafeGetTensorImpl(), all.size());
    if (is_new) all.push_back({{}, tensor, is_buffer});
    all[place->second].names.push_back(join_names(prefix, name));
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value(), false);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value(), true);
}

void save_module_tensors(StateWriter& writer, const std::vector<ModuleTensor>& tensors) {
  for (const ModuleTensor& entry : tensors) {
    const PlacePtr place = place_of(entry.tensor);
    save_at_place(writer, entry.names.front(), elements_of(entry.tensor, place), place);
  }
}

void load_module_tensors(const StateReader& reader, const std::vector<ModuleTensor>& tensors,
                         const LoadRules& rules) {
  std::vector<std::string> missing;
  std::vector<Found> found;
  std::set<std::string> known, of_ranks;
  for (const ModuleTensor& entry : tensors) {
    Found one{{}, place_of(entry.tensor)};
    one.elements = elements_of(entry.tensor, one.place);
    for (const std::string& name : entry.names) {
      known.insert(name);
      auto saved = saved_name(reader, name, one.place, entry.is_buffer);
      if (!saved) continue;
      if (*saved != name) of_ranks.insert(name);
      one.names.push_back(std::move(*saved));
    }
    if (!one.names.empty()) {
      found.push_back(std::move(one));
    } else if (!rules.allow_missing) {
      missing.push_back(reader.full_name(entry.names.front()));
    }
  }
  std::vector<std::string> unknown;
  if (!rules.allow_unexpected) {
    for (const std::string& name : reader.names()) {
      const bool of_rank = of_ranks.contains(name_of_any_rank(name).value_or(""));
      if (!known.contains(name) && !of_rank) unknown.push_back(reader.full_name(name));
    }
  }
  if (!missing.empty() || !unknown.empty()) {
    std::string text = "the checkpoint does not fit the module";
    if (!missing.empty()) text += fmt::format("; it lacks {}", listed(missing));
    if (!unknown.empty()) text += fmt::format("; the module lacks {}", listed(unknown));
    throw_invalid(text);
  }
  for (const Found& one : found) {
    for (const std::string& name : one.names)
      check_at_place(reader, name, one.elements, one.place, rules.cast);
    require_one_value(reader, one);
  }
  const at::NoGradGuard no_grad;
  for (const Found& one : found) load_at_place(reader, one.names.front(), one.elements.detach(), one.place);
}

namespace {

class ModuleSource final : public StateSource {
 public:
  explicit ModuleSource(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    if (!module_) throw_invalid("a module to save is null");
  }

  void save(StateWriter& writer) const override { save_module_tensors(writer, tensors()); }
  void load(const StateReader& reader) override {
    // Without a prefix the other tensors of the checkpoint belong to other objects.
    load_module_tensors(reader, tensors(), {.allow_unexpected = reader.full_name("").empty()});
  }

 private:
  std::vector<ModuleTensor> tensors() const {
    std::vector<ModuleTensor> all;
    append_module_tensors(all, *module_, "");
    return all;
  }

  const std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace

SourcePtr module_source(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<ModuleSource>(std::move(module));
}

SourcePtr module_source(torch::nn::Module& module) {
  return module_source(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &module));
}

void load_exactly(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  auto before = std::move(optimizer.state());
  optimizer.state().clear();
  try {
    optimizer.load(archive);
  } catch (...) {
    optimizer.state() = std::move(before);
    throw;
  }
}

}  // namespace torchspan::state
