#pragma once
#include <cstdint>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::engine {

/// A node without edges, at which a pass leaves this process. Only a GraphPass runs it, through run(); apply(),
/// which LibTorch's engine calls, must throw. Its inputs stand for several tensors, each of which would have a
/// node in one process: hooks of a tensor that the pass does not reach are not called. It runs before leaves
/// and all other ready nodes; of two, the one with the higher `order` runs first.
class PassNode : public torch::autograd::Node {
 public:
  static constexpr std::uint64_t kFirstSequence = std::uint64_t{1} << 63;

  explicit PassNode(std::uint64_t order = 0) : Node(/*sequence_nr=*/kFirstSequence | order) {}
  /// `gradients` has one gradient for each input, which may be undefined; `sink` belongs to the running pass.
  virtual void run(torch::autograd::variable_list gradients, GradientSink& sink) = 0;
};

}  // namespace torchspan::engine
