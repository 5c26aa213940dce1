#pragma once
#include <cstdint>
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// A saved state of LibTorch's CPU generator.
class RandomState {
 public:
  static RandomState capture();
  void restore() const;

 private:
  explicit RandomState(at::Tensor state) : state_(std::move(state)) {}
  at::Tensor state_;
};

/// Restores the state of LibTorch's CPU generator at the end of a scope.
class RandomScope {
 public:
  RandomScope() : before_(RandomState::capture()) {}
  ~RandomScope() { before_.restore(); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  const RandomState before_;
};

/// Seeds LibTorch's CPU generator for a scope. Does nothing without a seed.
class SeededScope {
 public:
  explicit SeededScope(std::optional<std::uint64_t> seed);

 private:
  std::optional<RandomScope> outer_;
};

/// Draws the next number of LibTorch's CPU generator.
std::uint64_t draw_seed();

}  // namespace torchspan::pipeline
