#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// A saved state of LibTorch's default generators: of the CPU and of each CUDA device.
class RandomState {
 public:
  static RandomState capture();
  void restore() const;

 private:
  struct One {
    at::Generator generator;
    at::Tensor state;
  };
  explicit RandomState(std::vector<One> states) : states_(std::move(states)) {}
  std::vector<One> states_;
};

/// Restores the states of LibTorch's default generators at the end of a scope.
class RandomScope {
 public:
  RandomScope() : before_(RandomState::capture()) {}
  ~RandomScope() { before_.restore(); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  const RandomState before_;
};

/// Seeds LibTorch's default generators for a scope. Does nothing without a seed.
class SeededScope {
 public:
  explicit SeededScope(std::optional<std::uint64_t> seed);

 private:
  std::optional<RandomScope> outer_;
};

/// Draws the next number of LibTorch's CPU generator.
std::uint64_t draw_seed();

}  // namespace torchspan::pipeline
