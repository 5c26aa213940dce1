#pragma once
// Plan: which stage computes which use of a layer. Includes no LibTorch.
#include <optional>
#include <string>
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::pipeline {

/// Location of a layer: its stage, and its index within the stage.
struct Location {
  int stage = 0;
  int index = 0;
  friend auto operator<=>(const Location&, const Location&) = default;
};

/// One use of a layer, in model order.
struct Invocation {
  int order = 0;
  int layer = 0;
  Location here;
  std::optional<Location> source;       ///< none: the pipeline's input
  std::optional<Location> destination;  ///< none: the pipeline's output
};

/// Consecutive invocations on one stage. It runs as one action and is a stage in schedule::Table.
struct LayerRange {
  int stage = 0;
  int worker = 0;  ///< index into Plan::workers
  int first = 0;   ///< orders, both inclusive
  int last = 0;
};

/// Data from one layer range to another: the output to the next, or a skip connection to any later one.
struct Link {
  int from = 0;
  int to = 0;
  int stashed_by = 0;  ///< orders of the two invocations
  int popped_by = 0;
  std::string skip;  ///< name at both ends; empty: the output
};

/// A skip connection within one layer range.
struct LocalSkip {
  std::string name;
  int stashed_by = 0;
  int popped_by = 0;
};

/// Input of make_plan(); needs no modules.
struct PlanRequest {
  struct Use {
    int layer = 0;
    std::vector<std::string> stashes;
    std::vector<std::string> pops;
    std::string space;
    std::string method;
  };
  std::vector<std::string> layers;   ///< names, by layer
  std::vector<Use> uses;             ///< in model order
  std::vector<int> balance;          ///< distinct layers per stage, in order of first use
  std::vector<std::string> workers;  ///< owner of each stage, by name
};

/// Owner of each layer, and the path of a micro-batch through the layers.
struct Plan {
  std::vector<std::string> layers;
  std::vector<std::string> methods;  ///< by order; empty: forward
  std::vector<Location> locations;   ///< by layer
  std::vector<std::string> workers;  ///< distinct ones, in the order of their first stage
  std::vector<int> worker_of_stage;  ///< index into `workers`
  std::vector<Invocation> invocations;
  std::vector<LayerRange> layer_ranges;
  std::vector<Link> links;  ///< outputs first: link s goes from layer range s to s + 1
  std::vector<LocalSkip> local_skips;

  int layer_range_of(int order) const;
  /// Formats an invocation: "layer 'Linear' (order 3, stage 1 on 'worker1')".
  std::string describe(int order) const;
  schedule::Placement placement(int micro_batches) const;
};

/// Places each layer on the stage of its first use and splits the model into layer ranges. Throws one
/// Error{kInvalid} that lists every problem: a balance with the wrong sum, stages without layers, stashes
/// without pops, and others.
Plan make_plan(const PlanRequest& request);

/// Text with one line per layer range: stage, worker, layers, links.
std::string to_text(const Plan& plan);
/// Self-contained SVG: one row per stage, one box per layer, arrows in the order of the invocations, dashed
/// skip connections.
std::string to_svg(const Plan& plan);

}  // namespace torchspan::pipeline
