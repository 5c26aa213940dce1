#include "fashion_mnist/comparison.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <unistd.h>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace fashion_mnist {
namespace {

at::Tensor flat_parameters(const ConvNet& network) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : network->parameters()) flat.push_back(parameter.detach().flatten());
  return at::cat(flat);
}

}  // namespace

void expect_equal_replicas(const Team& team, const ConvNet& network) {
  namespace collective = torchspan::collective;
  const at::Tensor most = team.group->all_reduce(flat_parameters(network), collective::kMax).wait();
  const at::Tensor least = team.group->all_reduce(flat_parameters(network), collective::kMin).wait();
  if (most.equal(least)) return;
  throw torchspan::Error(
      torchspan::ErrorKind::kInvalid,
      fmt::format(
          "parameters of the ranks differ by up to {:.1e}: they were not trained with equal gradients",
          (most - least).max().item<double>()));
}

void print_comparison(const Team& team, const Trained& together, const Trained& alone, int threads) {
  const at::Tensor reference = flat_parameters(alone.network);
  const double difference = (flat_parameters(together.network) - reference).abs().max().item<double>();
  double loss_difference = 0;
  auto epoch =
      static_cast<std::size_t>(together.result.first_epoch - 1);  // that of a resumed training is later
  for (const double loss : together.result.losses)
    loss_difference = std::max(loss_difference, std::abs(alone.result.losses[epoch++] - loss));
  fmt::print("{} against one process: losses differ by at most {:.1e}, parameters (up to {:.2f}) by {:.1e}\n",
             team.name(), loss_difference, reference.abs().max().item<double>(), difference);
  const double speed = together.result.images_per_second, speed_alone = alone.result.images_per_second;
  fmt::print(
      "speed-up {:.2f}: {:.0f} images/s with {}, {:.0f} with one process; {} thread{} each, {} cores\n",
      speed / speed_alone, speed, team.name(), speed_alone, threads, threads == 1 ? "" : "s",
      sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace fashion_mnist
