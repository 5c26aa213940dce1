#pragma once
#include <cstdint>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::engine {

/// A node without edges, at which a pass leaves this process. Only a GraphPass runs it, by run();
/// apply(), by which LibTorch's engine would, is to refuse. Its inputs stand for tensors that would each have
/// a node of its own in one process: the hooks of a tensor that the pass does not reach are not called. It
/// runs before leaves and before all other nodes that are ready; of two, that with the higher `order` first.
class PassNode : public torch::autograd::Node {
 public:
  static constexpr std::uint64_t kFirstSequence = std::uint64_t{1} << 63;

  explicit PassNode(std::uint64_t order = 0) : Node(/*sequence_nr=*/kFirstSequence | order) {}
  /// `sink` is that of the pass which runs this node. One gradient an input; they may be undefined.
  virtual void run(torch::autograd::variable_list gradients, GradientSink& sink) = 0;
};

}  // namespace torchspan::engine
