#pragma once
#include <cstdint>
#include <functional>

#include <torch/torch.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;

void train(const std::function<bool(std::int64_t step)>& after_step);
void save_checkpoint(std::int64_t step);
