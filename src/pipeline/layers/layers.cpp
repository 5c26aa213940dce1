#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/detail/rpc/value.h>
#include <torchspan/pipeline/layers.h>

namespace torchspan::pipeline::layers_detail {

std::string type_name(const std::type_info& type) { return rpc::demangle(type); }

void append_tensors(std::vector<at::Tensor>& all, const torch::nn::Module* module) {
  if (module == nullptr) return;
  for (const at::Tensor& parameter : module->parameters()) all.push_back(parameter);
  for (const at::Tensor& buffer : module->buffers()) all.push_back(buffer);
}

}  // namespace torchspan::pipeline::layers_detail
