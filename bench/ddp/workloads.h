#pragma once
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace torchspan::bench {

/// A module from one tensor to one tensor. peers/torch_ddp.py has the same modules.
struct Net : torch::nn::Module {
  virtual at::Tensor forward(at::Tensor input) = 0;
};

/// A model and its batch.
struct Workload {
  std::shared_ptr<Net> net;
  at::Tensor input;
  at::Tensor target;
};

/// "mlp": 24 MiB in six parameters; "resnet18": 43 MiB in 62; "many": 2,000 parameters of a few KiB.
std::vector<std::string> workload_names();
/// Returns how many steps a round measures.
int workload_steps(const std::string& name);
/// Weights depend only on the name, so all ranks build the same model. Throws std::out_of_range for other
/// names.
Workload make_workload(const std::string& name);

}  // namespace torchspan::bench
