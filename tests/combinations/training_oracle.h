#pragma once
// The same training in one process, by LibTorch alone.
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include "tests/combinations/training_case.h"

namespace torchspan::combinations {

/// What one phase of a training must give.
struct Expected {
  std::map<std::vector<int>, double> losses;  ///< by (step, pass, rank)
  std::map<std::vector<int>, double> norms;   ///< by (step)
  std::map<std::string, at::Tensor> model;    ///< parameters and buffers at the end
  std::vector<at::Tensor> own, seen;          ///< by rank
  double scale = 0;
};

std::vector<Expected> train_alone(const Case& one);

}  // namespace torchspan::combinations
