// Section autograd: one backward pass over the graph of this process, ours against LibTorch's engine.
#include <benchmark/benchmark.h>

#include <torch/torch.h>

#include <torchspan/engine/backward.h>
#include <torchspan/engine/gradient_map.h>

#include "bench/harness.h"

namespace torchspan {
namespace {

at::Tensor chain(const at::Tensor& x, std::int64_t length) {
  at::Tensor y = x;
  for (std::int64_t i = 0; i < length; ++i) y = y + 1;
  return y.sum();
}

/// Each parameter is used by a small branch of its own: as many leaves as inner nodes.
at::Tensor fan(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> branches;
  for (const at::Tensor& parameter : parameters) branches.push_back(parameter * 2);
  return at::stack(branches).sum();
}

std::vector<at::Tensor> leaves(std::int64_t count) {
  std::vector<at::Tensor> list;
  for (std::int64_t i = 0; i < count; ++i) list.push_back(at::ones({16}).requires_grad_());
  return list;
}

void ours(const at::Tensor& loss) {
  engine::GradientMap gradients;
  engine::MapSink sink(gradients);
  engine::backward({loss}, {}, sink, {.retain_graph = true});
  benchmark::DoNotOptimize(gradients.size());
}

void stock(const at::Tensor& loss, const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
  loss.backward({}, /*retain_graph=*/true);
}

void compare(bench::Bench& bench, const std::string& name, const at::Tensor& loss,
             const std::vector<at::Tensor>& parameters) {
  bench.add(name + "/libtorch", 20, [=] { stock(loss, parameters); });
  bench.add(name, 20, [=] { ours(loss); }, {.peer = name + "/libtorch"});
}

}  // namespace
}  // namespace torchspan

int main() {
  const auto executor = torchspan::make_executor();
  torchspan::bench::Bench bench(*executor);
  at::set_num_threads(1);
  const auto one = torchspan::leaves(1), many = torchspan::leaves(500);
  torchspan::compare(bench, "autograd/engine/chain_1000", torchspan::chain(one[0], 1000), one);
  torchspan::compare(bench, "autograd/engine/fan_500", torchspan::fan(many), many);
  bench.run(9);
  torchspan::bench::print_section(bench.metrics());
}
