#pragma once
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/collective/group.h>

namespace fashion_mnist {

/// The ranks that train together: those of a group, or this process alone.
struct Team {
  const torchspan::collective::Group* group = nullptr;
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

}  // namespace fashion_mnist
