#pragma once
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/device/streams.h>

namespace torchspan::engine {

/// The streams of one pass: those of its caller, on which its work begins and ends, and those of its nodes. If
/// the process has no devices with streams, nothing of it has an effect. Not thread-safe, except for const
/// members.
class PassStreams {
 public:
  /// `caller`: nullopt for the current streams of this thread. `events`: null for a separate pool.
  PassStreams(std::optional<device::Streams> caller, device::EventPoolPtr events);

  bool any() const { return any_; }
  const device::Streams& caller() const { return caller_; }
  const device::EventPoolPtr& events() const { return events_; }
  /// The stream on which `node` uses gradients on `device`: that of its forward operation, as its first input
  /// there says, or else the caller's.
  c10::Stream of(const torch::autograd::Node& node, c10::Device device) const;
  /// Makes the stream on which `consumer` uses `gradient` wait for this thread's current stream, which
  /// produces it, and prevents earlier reuse of its memory. Copies a gradient that has other owners if the two
  /// streams differ: a sum in place must not follow another owner's reads, which nothing orders before it.
  void hand_over(at::Tensor& gradient, const torch::autograd::Node& consumer) const;

  /// The pass runs a node that produces nothing for other nodes, or one that failed.
  void ends_at(const torch::autograd::Node& node);
  /// Makes the caller's streams wait for the streams of all such nodes.
  void join();

 private:
  const bool any_;
  const device::Streams caller_;
  const device::EventPoolPtr events_;
  std::vector<c10::Stream> ends_;
};

/// Runs a scope on the streams that a node's forward operation ran on: one for each device of its inputs.
class NodeStreamScope {
 public:
  NodeStreamScope(const torch::autograd::Node& node, const PassStreams& streams);

 private:
  device::StreamsScope streams_;
  c10::OptionalDeviceGuard device_;
};

/// Marks on the current streams of the thread that delivers gradients.
class ArrivalMarks {
 public:
  ArrivalMarks() = default;
  ArrivalMarks(const torch::autograd::variable_list& gradients, const device::EventPoolPtr& events);
  /// Makes the current streams of this thread wait for the marks, and keeps the memory of `gradients` for them.
  void join(const torch::autograd::variable_list& gradients) const;

 private:
  std::vector<device::Mark> marks_;
};

}  // namespace torchspan::engine
