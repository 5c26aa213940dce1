#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/messages/messages.h"

namespace torchspan::pipeline {

/// The input of a step on the worker of the first layer range, and the gradients that come back to it.
class StepInput {
 public:
  StepInput(const StepBegin& begin, Batch input);

  Activation micro_batch(int micro_batch) const;
  void put_gradients(int micro_batch, std::vector<at::Tensor> gradients);
  /// Whether the graph before the input has a backward.
  bool has_gradients() const { return !gradients_.empty(); }
  /// Runs it, from the gradients of all micro-batches.
  void backward() const;

 private:
  at::Tensor whole_gradient(std::size_t member) const;

  const bool has_backwards_;
  const std::vector<std::int64_t> rows_;  ///< by micro-batch
  const Batch input_;
  std::map<int, std::vector<at::Tensor>> gradients_;  ///< by micro-batch
};

/// The output of a step on the worker of the last layer range, or its loss. Joins the outputs of the micro-batches, and
/// splits the gradients of the whole output.
class StepOutput {
 public:
  explicit StepOutput(int micro_batches)
      : outputs_(static_cast<std::size_t>(micro_batches)),
        rows_(outputs_.size()),
        wants_gradient_(outputs_.size()) {}

  void put(int micro_batch, Activation activation);
  /// Returns the whole output, once. Members that need gradients become leaves that require them.
  Batch take();
  bool wants_gradients(int micro_batch) const;
  /// Gradients by micro-batch and member, from those of the whole output by member.
  std::vector<std::vector<at::Tensor>> split(const std::vector<at::Tensor>& gradients) const;

  /// Adds the loss of a micro-batch, which counts with its share of the batch. A loss on a device with streams stays there,
  /// so that the host waits for the device once per step.
  void add_loss(double share, at::Tensor loss);
  /// The sum of the losses, in the order of the calls of add_loss(). May wait for a device.
  double loss();

 private:
  // All by micro-batch.
  std::vector<Batch> outputs_;                             ///< until take()
  std::vector<std::vector<std::int64_t>> rows_;            ///< by member; -1: a tensor without rows
  std::vector<std::vector<std::uint8_t>> wants_gradient_;  ///< by member
  double loss_ = 0;
  std::vector<double> unread_shares_;  ///< of the losses on devices
  std::vector<at::Tensor> unread_losses_;
};

}  // namespace torchspan::pipeline
