#pragma once
#include <cstdlib>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;
struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor images);
};
TORCH_MODULE(Net);
extern Net net;
extern ts::Session& session;
c10::intrusive_ptr<c10d::ProcessGroup> make_nccl(const std::vector<int>& ranks, int rank);
