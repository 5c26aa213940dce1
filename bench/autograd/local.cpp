#include "bench/autograd/local.h"

#include <cmath>
#include <stdexcept>

#include <ATen/ATen.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "tests/support/local_backward.h"

namespace torchspan::bench {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor leaf(at::IntArrayRef sizes, c10::Device device = c10::kCPU) {
  return at::randn(sizes).mul_(0.1).to(device).requires_grad_();
}

at::Tensor chain(const Tensors& leaves) {
  at::Tensor y = leaves[0];
  for (int i = 0; i < 1000; ++i) y = y + 1;
  return y.sum();
}

/// Each parameter is used by a separate small branch.
at::Tensor fan(const Tensors& leaves) {
  Tensors branches;
  for (const at::Tensor& parameter : leaves) branches.push_back(parameter * 2);
  return at::stack(branches).sum();
}

at::Tensor normed(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift) {
  return at::batch_norm(x, scale, shift, {}, {}, true, 0.1, 1e-5, false);
}

/// Two 3x3 convolutions with batch norm, and a residual connection around them.
at::Tensor resnet_block(const Tensors& p) {
  const at::Tensor y = at::relu(normed(at::conv2d(p[0], p[1], {}, 1, 1), p[2], p[3]));
  return at::relu(normed(at::conv2d(y, p[4], {}, 1, 1), p[5], p[6]) + p[0]).mean();
}

/// Attention with four heads and an MLP, each after a layer norm and with a residual connection.
at::Tensor transformer_block(const Tensors& p) {
  const auto batch = p[0].size(0), length = p[0].size(1), width = p[0].size(2);
  const auto heads = [&](const at::Tensor& x) {
    return x.view({batch, length, 4, width / 4}).transpose(1, 2);
  };
  const Tensors parts = at::linear(at::layer_norm(p[0], {width}, p[1], p[2]), p[3], p[4]).chunk(3, -1);
  const at::Tensor q = heads(parts[0]), k = heads(parts[1]), v = heads(parts[2]);
  const double scale = 1 / std::sqrt(static_cast<double>(width) / 4);
  const at::Tensor mixed = at::softmax(at::matmul(q, k.transpose(2, 3)) * scale, -1).matmul(v);
  const at::Tensor attended = mixed.transpose(1, 2).reshape({batch, length, width});
  const at::Tensor x = p[0] + at::linear(attended, p[5], p[6]);
  const at::Tensor hidden = at::gelu(at::linear(at::layer_norm(x, {width}, p[7], p[8]), p[9], p[10]));
  return (x + at::linear(hidden, p[11], p[12])).mean();
}

void forget_gradients(const Program& program) {
  for (const at::Tensor& parameter : program.leaves) parameter.mutable_grad().reset();
}

double stock(Executor& executor, const Program& program, const std::function<void()>& finish) {
  forget_gradients(program);
  const at::Tensor loss = program.forward(program.leaves);
  finish();
  const TimePoint began = executor.now();
  loss.backward();
  finish();
  return micros(began, executor.now());
}

double ours(Executor& executor, const Program& program, const std::function<void()>& finish) {
  const at::Tensor loss = program.forward(program.leaves);
  engine::GradientMap gradients;
  finish();
  const TimePoint began = executor.now();
  engine::MapSink sink(gradients);
  engine::backward({loss}, {}, sink);
  finish();
  return micros(began, executor.now());
}

/// Throws unless both engines give every leaf the same gradient.
void compare(const Program& program) {
  forget_gradients(program);
  program.forward(program.leaves).backward();
  engine::GradientMap gradients;
  engine::MapSink sink(gradients);
  engine::backward({program.forward(program.leaves)}, {}, sink);
  for (const at::Tensor& parameter : program.leaves) {
    if (!at::allclose(gradients.gradient(parameter), parameter.grad(), 1e-4, 1e-6))
      throw std::runtime_error("the engines' gradients of " + program.name + " differ");
  }
}

}  // namespace

std::vector<Program> small_programs() {
  Tensors many;
  for (int i = 0; i < 500; ++i) many.push_back(leaf({16}));
  const std::int64_t c = 32;
  return {{"chain_1000", {leaf({16})}, chain},
          {"fan_500", many, fan},
          {"resnet_block",
           {leaf({4, c, 16, 16}), leaf({c, c, 3, 3}), leaf({c}), leaf({c}), leaf({c, c, 3, 3}), leaf({c}),
            leaf({c})},
           resnet_block},
          transformer_program("transformer_block", 4, 32, 64, c10::kCPU)};
}

Program transformer_program(std::string name, std::int64_t batch, std::int64_t length, std::int64_t width,
                            c10::Device device) {
  const auto on_device = [&](at::IntArrayRef sizes) { return leaf(sizes, device); };
  const std::int64_t w = width;
  return {std::move(name),
          {on_device({batch, length, w}), on_device({w}), on_device({w}), on_device({3 * w, w}),
           on_device({3 * w}), on_device({w, w}), on_device({w}), on_device({w}), on_device({w}),
           on_device({4 * w, w}), on_device({4 * w}), on_device({w, 4 * w}), on_device({w})},
          transformer_block};
}

Samples measure_engine(Executor& executor, const std::vector<Program>& programs, Duration limit,
                       const std::function<void()>& finish) {
  Samples samples;
  for (const Program& program : programs) {
    compare(program);
    const std::string name = "engine/" + program.name;
    take_turns(executor, samples,
               {{name, [&] { return ours(executor, program, finish); }},
                {name + "/libtorch", [&] { return stock(executor, program, finish); }}},
               500, limit);
  }
  return samples;
}

}  // namespace torchspan::bench
