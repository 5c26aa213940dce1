#pragma once
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/collective.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/evaluation.h"

namespace fashion_mnist {

/// The ranks that train together: those of a group, or this process alone.
struct Team {
  const torchspan::Group* group = nullptr;
  int rank = 0;
  int size = 1;
  c10::Device device = c10::kCPU;

  /// "2 ranks" or "one process".
  std::string name() const;
  /// This rank's part of the positions. Parts differ in size by at most one; if the last batch is smaller
  /// than the team, some are empty.
  at::Tensor part(const at::Tensor& positions) const;
  double sum(double mine) const;
  void wait_for_each_other() const;
};

/// The share of images that a model classifies right. Each rank tests its part of the images; all get the share of the
/// whole.
double accuracy(const Dataset& data, const Forward& forward, const Team& team);

}  // namespace fashion_mnist
