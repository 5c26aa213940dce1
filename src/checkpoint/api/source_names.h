#pragma once
#include <string>

#include <torchspan/checkpoint/state.h>

namespace torchspan::checkpoint {

/// Throws Error{kInvalid} naming both if one of these objects owns the names below its own name
/// (StateSource::owns_names()) and the other one's name is one of them.
void require_separate_names(const std::string& name, const StateSource& source, const std::string& other_name,
                            const StateSource& other);

}  // namespace torchspan::checkpoint
