#pragma once
#include <optional>
#include <string>
#include <vector>

#include <torchspan/schedule/schedule.h>

namespace torchspan::pipeline {

/// Where a layer lives: the stage, and its place among the stage's layers.
struct Location {
  int stage = 0;
  int index = 0;
  friend auto operator<=>(const Location&, const Location&) = default;
};

/// One use of a layer in the order of the model.
struct Invocation {
  int order = 0;
  int layer = 0;
  Location here;
  std::optional<Location> source;       ///< none: the pipeline's input
  std::optional<Location> destination;  ///< none: the pipeline's output
};

/// Consecutive invocations on one stage: what runs as one task of a schedule, in which it is a stage.
struct LayerRange {
  int stage = 0;
  int worker = 0;  ///< index into Plan::workers
  int first = 0;   ///< orders, both inclusive
  int last = 0;
};

/// What one segment hands to another: its output to the next, or a skip connection to any later one.
struct Link {
  int from = 0;
  int to = 0;
  int stashed_by = 0;  ///< orders of the two invocations
  int popped_by = 0;
  std::string skip;  ///< the name as both call it; empty: the output
};

/// A skip connection that stays inside one segment.
struct LocalSkip {
  std::string name;
  int stashed_by = 0;
  int popped_by = 0;
};

/// What a plan is made of; no module is needed for it.
struct PlanRequest {
  struct Use {
    int layer = 0;
    std::vector<std::string> stashes;
    std::vector<std::string> pops;
    std::string space;
    std::string method;
  };
  std::vector<std::string> layers;   ///< names, by layer
  std::vector<Use> uses;             ///< in the order of the model
  std::vector<int> balance;          ///< distinct layers of each stage, in the order of their first use
  std::vector<std::string> workers;  ///< the owner of each stage, by name
};

/// Who owns which layer, and the way of a micro-batch through them.
struct Plan {
  std::vector<std::string> layers;
  std::vector<std::string> methods;  ///< by order; empty: forward
  std::vector<Location> locations;   ///< by layer
  std::vector<std::string> workers;  ///< distinct ones, in the order of their first stage
  std::vector<int> worker_of_stage;  ///< index into workers
  std::vector<Invocation> invocations;
  std::vector<LayerRange> segments;
  std::vector<Link> links;  ///< first the outputs: link s leads from segment s to s + 1
  std::vector<LocalSkip> local_skips;

  int segment_of(int order) const;
  /// "layer 'Linear' (order 3, stage 1 on 'worker1')".
  std::string describe(int order) const;
  schedule::Placement placement(int micro_batches) const;
};

/// A layer lives where its first use falls; later uses go there. Throws one Error{kInvalid} that lists
/// everything that is wrong: balance that does not add up, stages without layers, stashes without pops and
/// the like.
Plan make_plan(const PlanRequest& request);

/// A line a segment: stage, worker, layers, links.
std::string to_text(const Plan& plan);
/// A self-contained SVG: a row a stage, a box a layer, arrows in the order of the invocations, skips dashed.
std::string to_svg(const Plan& plan);

}  // namespace torchspan::pipeline
