#include "checkpoint/api/source_names.h"

#include <fmt/format.h>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>

namespace torchspan::checkpoint {
namespace {

void require_not_below(const std::string& owner, const StateSource& source, const std::string& name) {
  if (!source.owns_names() || !name.starts_with(owner + ".")) return;
  throw_invalid(fmt::format(
      "'{}' cannot be registered together with '{}', whose tensors have names that begin with '{}.'; use a "
      "name without this beginning",
      name, owner, owner));
}

}  // namespace

void require_separate_names(const std::string& name, const StateSource& source, const std::string& other_name,
                            const StateSource& other) {
  require_not_below(other_name, other, name);
  require_not_below(name, source, other_name);
}

}  // namespace torchspan::checkpoint
