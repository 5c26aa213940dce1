#pragma once
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>

namespace torchspan::engine {

/// Whether this process has CUDA devices; without, everything here does nothing.
bool has_cuda();

/// Runs a scope on the stream that a node's forward operation ran on.
class NodeStreamScope {
 public:
  NodeStreamScope(const torch::autograd::Node& node, bool cuda);
  /// The node's stream, when it has one.
  const c10::Stream* stream() const { return stream_.empty() ? nullptr : &stream_.front(); }

 private:
  std::vector<c10::Stream> stream_;
  c10::OptionalStreamGuard guard_;
};

/// Makes the stream that input `input` of `consumer` is used on wait for `gradient`, produced on this
/// thread's current stream, keeps its memory from reuse before that, and runs a scope on the consumer's
/// stream.
class HandOverScope {
 public:
  HandOverScope(const at::Tensor& gradient, const torch::autograd::Node& consumer, std::uint32_t input);

 private:
  c10::OptionalStreamGuard guard_;
};

/// What the current streams of this thread were doing when gradients were delivered; wait() makes the current
/// streams of another thread wait for it.
class ArrivalEvents {
 public:
  ArrivalEvents() = default;
  ArrivalEvents(const torch::autograd::variable_list& gradients, bool cuda);
  void wait() const;

 private:
  struct Recorded;
  std::vector<std::shared_ptr<Recorded>> events_;
};

/// The caller's streams of a pass: they wait, at the end of the pass, for every stream that a leaf used.
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
