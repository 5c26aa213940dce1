#pragma once
#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// Backward passes in this process, ours and LibTorch's in turns: "engine/<graph>" and
/// "engine/<graph>/libtorch". The forward pass, made anew each time, does not count.
Samples measure_engine(Executor& executor, Duration limit);

}  // namespace torchspan::bench
