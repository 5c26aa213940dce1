#include "state/api/load_exactly.h"

#include <utility>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace torchspan::state {

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
