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

/// Whether no backward pass can have a gradient of the parameter: its dtype is neither floating-point nor complex.
bool never_trained(const at::Tensor& parameter);

/// Throws Error{kInvalid} for a parameter, which it names, that is undefined, not a leaf, not floating-point, or listed
/// twice. `names`: of the parameters, or none.
void check_parameters(const std::string& optimizer, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names);

/// "parameter 3 'layer.weight' (shape [2, 3], Double)".
std::string describe_parameter(const at::Tensor& parameter, std::size_t index,
                               const std::vector<std::string>& names);

/// The parameters of a module by name, without those that are never trained. A parameter that several layers share is
/// listed once.
std::vector<std::pair<std::string, at::Tensor>> named_parameters_of(const torch::nn::Module& module);

/// The defined `.grad` of parameters. That of a parameter that is listed several times is returned once.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

/// Throws Error{kInvalid} if backward() steps one of the parameters: then no gradient is left for `verb`.
void refuse_steps_in_backward(const std::vector<at::Tensor>& parameters, const char* verb);

}  // namespace torchspan::optim
