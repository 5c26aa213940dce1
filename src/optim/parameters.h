#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace torchspan::optim {

/// The parameters of a module by name. A parameter that several layers share is listed once.
std::vector<std::pair<std::string, at::Tensor>> named_parameters_of(const torch::nn::Module& module);

/// The defined `.grad` of parameters. That of a parameter that is listed several times is returned once.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

/// Throws Error{kInvalid} if backward() steps one of the parameters: then no gradient is left for `verb`.
void refuse_steps_in_backward(const std::vector<at::Tensor>& parameters, const char* verb);

}  // namespace torchspan::optim
