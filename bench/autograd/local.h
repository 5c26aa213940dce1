#pragma once
#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// Measures backward passes in this process, with TorchSpan and LibTorch in turns: "engine/<graph>" and
/// "engine/<graph>/libtorch". The forward pass, which precedes each backward, is not measured.
Samples measure_engine(Executor& executor, Duration limit);

}  // namespace torchspan::bench
