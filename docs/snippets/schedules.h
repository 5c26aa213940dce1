#pragma once
#include <chrono>
#include <fstream>

#include <torchspan/pipeline.h>

using namespace std::chrono_literals;

extern torchspan::Worker& worker;
extern torchspan::Layers layers;
extern at::Tensor x, y;
at::Tensor loss(const at::Tensor& output, const at::Tensor& target);
