#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace torchspan::optim {

/// The parameters of a module, each once: weights that several layers share have one step.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module);

}  // namespace torchspan::optim
