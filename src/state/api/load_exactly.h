#pragma once

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
}

namespace torchspan::state {

/// Loads the state of one of LibTorch's optimizers: it then has what the archive has. Optimizer::load() keeps the state of
/// parameters that the archive lacks, which is newer than what it restores. If loading throws, the state is as before.
void load_exactly(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

}  // namespace torchspan::state
