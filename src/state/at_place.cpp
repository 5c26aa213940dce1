#include "state/api/at_place.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <torchspan/core/error.h>

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
                                      const PlacePtr& place) {
  if (!place || !place->own) return reader.has(name) ? std::optional(name) : std::nullopt;
  if (reader.has(own_name(name, *place))) return own_name(name, *place);
  if (reader.has(name)) return name;  // of a program in which it was equal on all ranks
  std::vector<std::string> others;
  for (std::string& other : reader.names()) {
    if (name_of_any_rank(other) == name) others.push_back(std::move(other));
  }
  if (others.empty()) return std::nullopt;
  if (others.size() == 1) return others.front();  // of the only rank that saved
  if (place->exchangeable)
    return others[static_cast<std::size_t>(place->among.front()->rank()) % others.size()];
  throw_invalid(
      fmt::format("'{}' was saved by each rank for itself ('{}'), but not by rank {}: restore it with as "
                  "many ranks as saved it, or read "
                  "one of these with Checkpoint::read() and assign it",
                  reader.full_name(name), fmt::join(others, "', '"), place->among.front()->rank()));
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

}  // namespace torchspan::state
