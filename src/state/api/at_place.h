#pragma once
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/state/source.h>

#include "state/api/place.h"

namespace torchspan::state {

/// What this rank has of a parameter or buffer at `place`, which is the tensor itself unless the place names other elements.
const at::Tensor& elements_of(const at::Tensor& tensor, const PlacePtr& place);

/// Saves the elements that this rank has of a tensor at `place`: the whole tensor, boxes of it, or, under a name of this
/// rank, what is its own.
void save_at_place(StateWriter& writer, const std::string& name, const at::Tensor& elements,
                   const PlacePtr& place);

/// Under which name the checkpoint has such a tensor for this rank; nullopt if it has none. Throws Error{kInvalid} if it
/// has only those of several other ranks.
std::optional<std::string> saved_name(const StateReader& reader, const std::string& name,
                                      const PlacePtr& place);

/// As StateReader::check(), with the shape of the whole tensor.
void check_at_place(const StateReader& reader, const std::string& saved, const at::Tensor& elements,
                    const PlacePtr& place, bool cast = false);
/// Loads what check_at_place() has checked; another dtype is converted.
void load_at_place(const StateReader& reader, const std::string& saved, const at::Tensor& elements,
                   const PlacePtr& place);

/// "name.rank3" of a tensor that rank 3 has as its own.
std::string own_name(const std::string& name, const Place& place);
/// The name without ".rank" and a number; nullopt if it does not end so.
std::optional<std::string> name_of_any_rank(const std::string& name);

}  // namespace torchspan::state
