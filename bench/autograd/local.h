#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// Leaves, and a function that computes a scalar from them.
struct Program {
  std::string name;
  std::vector<at::Tensor> leaves;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> forward;
};

/// Small graphs on the CPU, whose time is mostly the engine's own.
std::vector<Program> small_programs();
/// Attention with four heads and an MLP on inputs of [batch, length, width].
Program transformer_program(std::string name, std::int64_t batch, std::int64_t length, std::int64_t width,
                            c10::Device device);

/// Measures backward passes in this process, with TorchSpan and LibTorch in turns: "engine/<graph>" and
/// "engine/<graph>/libtorch". The forward pass, which precedes each backward, is not measured. `finish`, if any, waits
/// for the device before and after each backward.
Samples measure_engine(
    Executor& executor, const std::vector<Program>& programs, Duration limit,
    const std::function<void()>& finish = [] {});

}  // namespace torchspan::bench
