#pragma once
#include <cstdint>
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// The state of LibTorch's CPU generator, to be had back later.
class RandomState {
 public:
  static RandomState capture();
  void restore() const;

 private:
  explicit RandomState(at::Tensor state) : state_(std::move(state)) {}
  at::Tensor state_;
};

/// Gives the generator its present state back at the end of a scope.
class RandomScope {
 public:
  RandomScope() : before_(RandomState::capture()) {}
  ~RandomScope() { before_.restore(); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  const RandomState before_;
};

/// Seeds LibTorch's CPU generator for a scope; without a seed does nothing.
class SeededScope {
 public:
  explicit SeededScope(std::optional<std::uint64_t> seed);

 private:
  std::optional<RandomScope> outer_;
};

/// The next number of LibTorch's CPU generator.
std::uint64_t draw_seed();

}  // namespace torchspan::pipeline
