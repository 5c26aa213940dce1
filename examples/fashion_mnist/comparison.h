#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "fashion_mnist/model.h"
#include "fashion_mnist/team.h"
#include "fashion_mnist/team_report.h"

namespace fashion_mnist {

/// Throws torchspan::Error on all ranks of the team if any bit of a parameter differs.
void expect_equal_replicas(const Team& team, const ConvNet& network);

/// A training that ended, and the network that it trained.
struct Trained {
  const TeamResult& result;
  const ConvNet& network;
};

/// Prints how far the trainings of a team and of one process are apart, and how much faster the team was. `threads` is
/// the number of LibTorch's threads in each process.
void print_comparison(const Team& team, const Trained& together, const Trained& alone, int threads);

}  // namespace fashion_mnist
