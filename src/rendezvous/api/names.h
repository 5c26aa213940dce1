#pragma once
#include <string_view>

namespace torchspan::rendezvous {

/// Whether `name` can name a worker or a tag: 1 to 127 of A-Z a-z 0-9 _ . : -
bool is_name(std::string_view name);

/// Throws kInvalid unless `name` is valid; `what` names its source ("TORCHSPAN_NAME").
void check_name(std::string_view name, std::string_view what);

}  // namespace torchspan::rendezvous
