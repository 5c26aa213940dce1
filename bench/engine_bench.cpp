// One backward pass over a chain of 1,000 nodes and over a wide graph: ours against LibTorch's engine.
#include <benchmark/benchmark.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/engine/backward.h>
#include <torchspan/engine/gradient_map.h>

namespace {

using at::Tensor;

Tensor chain(const Tensor& x, int64_t length) {
  Tensor y = x;
  for (int64_t i = 0; i < length; ++i) y = y + 1;
  return y.sum();
}

/// `width` parameters, each used by its own small branch: as many leaves as inner nodes.
Tensor fan(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> branches;
  for (const Tensor& parameter : parameters) branches.push_back(parameter * 2);
  return at::stack(branches).sum();
}

void ours(const Tensor& loss) {
  torchspan::engine::GradientMap gradients;
  torchspan::engine::MapSink sink(gradients);
  torchspan::engine::backward({loss}, {}, sink, {.retain_graph = true});
  benchmark::DoNotOptimize(gradients.size());
}

void stock(const Tensor& loss, const std::vector<Tensor>& parameters) {
  for (const Tensor& parameter : parameters) parameter.mutable_grad().reset();
  loss.backward({}, /*retain_graph=*/true);
}

void chain_ours(benchmark::State& state) {
  const Tensor x = at::ones({1}).requires_grad_();
  const Tensor loss = chain(x, state.range(0));
  for (auto _ : state) ours(loss);
}

void chain_stock(benchmark::State& state) {
  const Tensor x = at::ones({1}).requires_grad_();
  const Tensor loss = chain(x, state.range(0));
  for (auto _ : state) stock(loss, {x});
}

std::vector<Tensor> parameters(int64_t count) {
  std::vector<Tensor> list;
  for (int64_t i = 0; i < count; ++i) list.push_back(at::ones({16}).requires_grad_());
  return list;
}

void fan_ours(benchmark::State& state) {
  const auto leaves = parameters(state.range(0));
  const Tensor loss = fan(leaves);
  for (auto _ : state) ours(loss);
}

void fan_stock(benchmark::State& state) {
  const auto leaves = parameters(state.range(0));
  const Tensor loss = fan(leaves);
  for (auto _ : state) stock(loss, leaves);
}

BENCHMARK(chain_ours)
    ->Name("autograd/engine/chain/torchspan")
    ->Arg(1)
    ->Arg(1000)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(chain_stock)
    ->Name("autograd/engine/chain/libtorch")
    ->Arg(1)
    ->Arg(1000)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(fan_ours)->Name("autograd/engine/fan/torchspan")->Arg(500)->Unit(benchmark::kMicrosecond);
BENCHMARK(fan_stock)->Name("autograd/engine/fan/libtorch")->Arg(500)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
