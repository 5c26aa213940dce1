#pragma once
#include <cstdint>
#include <cstdio>

#include "docs/snippets/modules.h"

struct Points {
  torch::Tensor places, arms;
};
Points make_points(std::int64_t count);
torch::nn::Sequential make_network();
double train_step(std::int64_t step);

inline constexpr ts::ModuleClass<Encoder, std::int64_t> kEncoder{"Encoder"};

extern ts::Session& session;
extern Points points;
extern torch::nn::Sequential network;
extern ts::DistributedDataParallel<torch::nn::Sequential>& model;
extern torch::optim::Adam& optimizer;
extern std::int64_t steps, begin;
extern torch::Tensor input, target;
