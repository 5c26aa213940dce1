#pragma once
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace torchspan::bench {

/// A module from one tensor to one tensor; the same ones stand in peers/torch_ddp.py.
struct Net : torch::nn::Module {
  virtual at::Tensor forward(at::Tensor input) = 0;
};

/// A model and the batch that it is measured with.
struct Workload {
  std::shared_ptr<Net> net;
  at::Tensor input;
  at::Tensor target;
};

/// "mlp": 24 MiB in six parameters; "resnet18": 43 MiB in 62; "many": 2,000 parameters of a few KiB.
std::vector<std::string> workload_names();
/// How many steps of it are measured in a round.
int workload_steps(const std::string& name);
/// The weights follow from the name: all ranks make the same. Throws std::out_of_range for other names.
Workload make_workload(const std::string& name);

}  // namespace torchspan::bench
