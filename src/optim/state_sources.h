#pragma once
#include <torchspan/state/source.h>

namespace torchspan::optim {

class DistributedOptimizer;
class FunctionalOptimizer;
class Optimizer;

/// How optimizers list their state for checkpoints. Each holds a reference.
state::SourcePtr source_of(Optimizer& optimizer);
state::SourcePtr source_of(DistributedOptimizer& optimizer);
state::SourcePtr source_of(FunctionalOptimizer& optimizer);

}  // namespace torchspan::optim
