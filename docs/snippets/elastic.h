#pragma once
#include <optional>

#include <torch/torch.h>

#include <torchspan/elastic.h>
#include <torchspan/torchspan.h>

namespace ts = torchspan;

using Model = ts::ElasticTrainer<torch::nn::Linear>::Model;
extern Model& model;
extern const ts::ElasticStep& step;
torch::Tensor loss_of(Model& model, const std::vector<std::int64_t>& samples);
extern ts::Session session;
extern torch::nn::Linear network;
extern ts::optim::Optimizer optimizer;
extern ts::ElasticTrainer<torch::nn::Linear> trainer;
