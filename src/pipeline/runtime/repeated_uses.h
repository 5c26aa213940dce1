#pragma once
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "engine/api/node_ptr.h"
#include "pipeline/layers/random.h"
#include "pipeline/runtime/in_place_watch.h"
#include "pipeline/runtime/layer_runner.h"

namespace torchspan::pipeline {

/// The uses of PipelineOptions::checkpoint_layers in one pass: each keeps its input instead of its graph. A node stands
/// for the missing graph among those of the other layers; repeat() records the graph and links it there, so that one
/// backward runs through all. Used by the training thread.
class RepeatedUses {
 public:
  explicit RepeatedUses(const LocalPipeline& local) : local_(local) {}

  /// Whether the layer of this use is one of PipelineOptions::checkpoint_layers.
  bool selects(int order) const;
  /// Runs a use without recording its graph; records it if nothing in it can have a gradient that is known before.
  UseOutput run(const LayerRunner& runner, int order, UseInput input);
  /// Whether there is a graph to record.
  bool any() const { return !uses_.empty(); }
  /// Runs the forwards again, in order, and records their graphs.
  void repeat(const LayerRunner& runner);

 private:
  class GraphNode;
  struct Kept {
    int order = 0;
    UseInput input;
    std::optional<RandomState> random;  ///< without a seed
    InPlaceWatch watch;
    engine::NodePtr node;  ///< a GraphNode
  };
  void check_unchanged(const LayerRunner& runner, const Kept& kept, const char* phase) const;

  const LocalPipeline& local_;
  std::vector<Kept> uses_;
};

}  // namespace torchspan::pipeline
