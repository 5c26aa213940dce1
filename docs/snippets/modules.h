#pragma once
// Modules and data that several documents use.
#include <cstdint>
#include <vector>

#include <torch/torch.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;
using namespace std::chrono_literals;

struct EncoderImpl : torch::nn::Module {
  explicit EncoderImpl(std::int64_t width);
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Encoder);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl(std::int64_t width, std::int64_t classes);
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Decoder);

struct Batch {
  torch::Tensor data, target, images, labels, x, y, ids;
};
extern std::vector<Batch> batches;

extern ts::Session& session;
extern ts::Worker& worker;
