#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "engine/test_nodes.h"

namespace torchspan::engine::testing {

/// A random graph, the same for the same seed: leaves 0 to 3 are 3x3 matrices, 4 a row, 5 a scalar, 6 a 5x3
/// table that is looked up sparsely, 7 a matrix of double precision.
class RandomProgram {
 public:
  using Hop = std::function<at::Tensor(const at::Tensor&)>;
  /// `hop` takes a tensor to another worker; identity when it is empty.
  explicit RandomProgram(std::uint32_t seed, Hop hop = {}) : random_(seed), hop_(std::move(hop)) {}

  static std::vector<at::Tensor> values(std::uint32_t seed) {
    torch::manual_seed(seed);
    std::vector<at::Tensor> values;
    for (int i = 0; i < 4; ++i) values.push_back(at::randn({3, 3}));
    values.push_back(at::randn({3}));
    values.push_back(at::randn({}));
    values.push_back(at::randn({5, 3}));
    values.push_back(at::randn({3, 3}, at::kDouble));
    return values;
  }

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& leaves) {
    leaves_ = leaves;
    pool_.assign(leaves.begin(), leaves.begin() + 4);
    const int steps = 4 + draw(24);
    for (int step = 0; step < steps; ++step) {
      at::Tensor next = this->step();
      pool_.push_back(hop_ && draw(4) == 0 && next.requires_grad() ? hop_(next) : next);
    }
    std::vector<at::Tensor> roots;
    const int count = 1 + draw(3);
    while (static_cast<int>(roots.size()) < count) {
      at::Tensor root = pick();
      if (root.requires_grad()) roots.push_back(draw(2) ? root : root.sum());
    }
    return roots;
  }

 private:
  int draw(int below) { return static_cast<int>(random_() % static_cast<std::uint32_t>(below)); }
  /// Mostly recent values, so that graphs grow deep; sometimes a leaf.
  const at::Tensor& pick() {
    const int size = static_cast<int>(pool_.size());
    const int back = draw(draw(3) == 0 ? size : std::min(size, 5));
    return pool_[size - 1 - back];
  }

  at::Tensor step() {
    const at::Tensor a = pick(), b = pick();
    switch (draw(22)) {
      case 0:
        return a + b;
      case 1:
        return a * b;
      case 2:
        return a - b.tanh();
      case 3:
        return a.matmul(b).tanh();
      case 4:
        return a.sin();
      case 5:
        return a.sigmoid() * leaves_[5];
      case 6:
        return a + leaves_[4];
      case 7:
        return a.sum(0, true).tanh().expand({3, 3});
      case 8:
        return at::cat({a.narrow(0, 0, 1), b.narrow(0, 1, 2)}, 0);
      case 9:
        return a.unbind(draw(2))[draw(3)] + b;
      case 10:
        return in_place(a, b);
      case 11:
        return a.index_select(0, torch::tensor({0, 2, 2}));
      case 12:
        return at::embedding(leaves_[6], torch::tensor({1, 4, 1}), -1, false, true) * a;
      case 13:
        return a + leaves_[6].narrow(0, 1, 3);
      case 14:
        return (a.to(at::kDouble) * leaves_[7]).tanh().to(at::kFloat);
      case 15:
        return at::where(a > b, a, b);
      case 16:
        return std::get<0>(a.sort(1)) * b;
      case 17:
        return Forgetter::apply(a, b);
      case 18:
        return Pair::apply(a)[draw(2)];
      case 19:
        return Recomputed::apply(a, b);
      case 20:
        return a.detach() + b;
      default:
        return a.t().reshape({9}).view({3, 3});
    }
  }

  at::Tensor in_place(const at::Tensor& a, const at::Tensor& b) {
    at::Tensor y = a.clone();
    y.mul_(b);
    y.select(0, draw(3)).add_(b.select(1, 0));
    return y;
  }

  std::mt19937 random_;
  Hop hop_;
  std::vector<at::Tensor> leaves_;
  std::vector<at::Tensor> pool_;
};

}  // namespace torchspan::engine::testing
