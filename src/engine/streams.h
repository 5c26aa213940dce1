#pragma once
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>

namespace torchspan::engine {

/// Whether this process has CUDA devices; if not, the classes below have no effect.
bool has_cuda();

/// Runs a scope on the stream that a node's forward operation ran on.
class NodeStreamScope {
 public:
  NodeStreamScope(const torch::autograd::Node& node, bool cuda);
  /// The node's stream, or null.
  const c10::Stream* stream() const { return stream_.empty() ? nullptr : &stream_.front(); }

 private:
  std::vector<c10::Stream> stream_;
  c10::OptionalStreamGuard guard_;
};

/// Makes the stream of input `input` of `consumer` wait for `gradient`, which this thread's current stream
/// produces, prevents earlier reuse of its memory, and runs a scope on the consumer's stream.
class HandOverScope {
 public:
  HandOverScope(const at::Tensor& gradient, const torch::autograd::Node& consumer, std::uint32_t input);

 private:
  c10::OptionalStreamGuard guard_;
};

/// Events on the current streams of the thread that delivers gradients; wait() makes the current streams of
/// another thread wait for them.
class ArrivalEvents {
 public:
  ArrivalEvents() = default;
  ArrivalEvents(const torch::autograd::variable_list& gradients, bool cuda);
  void wait() const;

 private:
  struct Recorded;
  std::vector<std::shared_ptr<Recorded>> events_;
};

/// The streams of a pass's caller. At the end of the pass they wait for every stream that a leaf used.
class CallerStreams {
 public:
  explicit CallerStreams(bool cuda);
  void leaf_used(const c10::Stream& stream);
  void join();

 private:
  std::vector<c10::Stream> caller_;
  std::vector<c10::Stream> leaves_;
};

}  // namespace torchspan::engine
