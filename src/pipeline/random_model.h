#pragma once
// Random models for the tests: a list of operations that runs twice, through a Pipeline and in a plain loop in
// one process.
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <torchspan/pipeline.h>
#include <torchspan/pipeline/deferred_batch_norm.h>

namespace torchspan::pipeline::testing {

inline constexpr std::int64_t kWidth = 3;

inline at::Tensor seeded(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}

/// x -> tanh(x w + b), and back through the same weight.
struct DenseImpl : torch::nn::Module {
  explicit DenseImpl(std::uint64_t seed) {
    weight = register_parameter("weight", seeded({kWidth, kWidth}, seed));
    bias = register_parameter("bias", seeded({kWidth}, seed + 1000));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight) + bias); }
  at::Tensor back(const at::Tensor& x) { return at::matmul(x - bias, weight.t()); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Dense);

/// Several values: among them an integer tensor, an optional tensor and a number.
using Several = std::tuple<at::Tensor, at::Tensor, at::Tensor, std::optional<at::Tensor>, std::int64_t>;

inline Several fork(const at::Tensor& x) {
  return {x * 2, at::sin(x), (x > 0).to(at::kLong), std::nullopt, 3};
}
inline at::Tensor unite(const Several& all) {
  const auto& [a, b, signs, nothing, number] = all;
  return a + b * number + signs.to(at::kDouble) + (nothing ? *nothing : at::zeros({}, at::kDouble));
}
/// Leaves one of two differentiable values unused.
inline at::Tensor choose(const Several& all) { return std::get<0>(all); }

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(std::uint64_t seed) { scale = register_parameter("scale", seeded({kWidth}, seed)); }
  Several forward(const at::Tensor& a, const at::Tensor& b, const at::Tensor& signs,
                  const std::optional<at::Tensor>& nothing, std::int64_t number) {
    return {a * scale, b, signs, nothing ? nothing : std::optional(b * 0.5), number + 1};
  }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

inline at::Tensor drop(const at::Tensor& x) { return at::dropout(x, 0.4, true); }

struct Operation {
  enum Kind {
    kDense,
    kDenseBack,
    kNorm,
    kDrop,
    kInPlace,
    kFork,
    kScale,
    kUnite,
    kChoose,
    kStash,
    kPop,
    kCut
  } kind{};
  int object = 0;    ///< which Dense, norm or Scale
  std::string skip;  ///< name of a stash or pop
};

struct RandomModel {
  std::vector<Operation> operations;
  std::uint64_t weights = 0;
};

/// A random model, how to run it, and its text.
struct RandomCase {
  RandomModel model;
  int workers = 1;
  PipelineOptions options;
  std::vector<std::int64_t> rows;  ///< by step
  std::string text;
};
RandomCase make_case(std::uint64_t seed);
Layers layers_of(const RandomModel& model);

/// The results of all steps, by name.
struct Outcome {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients;
  std::map<std::string, at::Tensor> buffers;
};
/// Runs the model without a pipeline: micro-batch by micro-batch, in one process.
Outcome run_plain_model(const RandomCase& random);
/// Runs it as a pipeline on simulated workers; `seed` is that of the simulation.
Outcome run_in_pipeline(const RandomCase& random, std::uint64_t seed);
at::Tensor input_of(const RandomCase& random, std::size_t step);
at::Tensor target_of(const RandomCase& random, std::size_t step);
at::Tensor loss_between(const at::Tensor& output, const at::Tensor& target);

}  // namespace torchspan::pipeline::testing
