#pragma once
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

/// Pipeline schedules as pure functions: a shape goes in, each rank's tasks in their order come out. No
/// clock, no thread, no tensor. Functions throw Error{kInvalid} that names the parameter.
namespace torchspan::schedule {

/// What a stage does with one micro-batch. kBackward is kInputGradient and kWeightGradient in one; schedules
/// that fill the bubble split the two.
enum class ActionKind : std::uint8_t { kForward, kBackward, kInputGradient, kWeightGradient };

/// One cell of a schedule. Stages and micro-batches count from 0.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;
  friend auto operator<=>(const Action&, const Action&) = default;
};

/// Stage, letter (F, B, I, W) and micro-batch: "2F5".
std::string to_string(const Action& task);

/// How large a pipeline is; stage s lives on rank s modulo `ranks`.
struct Shape {
  int ranks = 1;
  int micro_batches = 1;
  int stages_per_rank = 1;
};

/// Stages anywhere, in the order of the model: a rank may be visited any number of times, and next to itself.
struct Placement {
  std::vector<int> rank_of_stage;
  int micro_batches = 1;
  int ranks = 0;  ///< 0: one more than the largest in rank_of_stage
};

/// Stage s on rank s modulo ranks.
Placement looped(Shape shape);

/// A whole step: which rank owns each stage, and each rank's tasks in the order in which it runs them.
struct Table {
  std::string name;
  std::vector<int> rank_of_stage;
  int micro_batches = 1;
  std::vector<std::vector<Action>> tasks;  ///< by rank
  int ranks() const { return static_cast<int>(tasks.size()); }
  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};

/// Forwards only: inference. Each rank runs them in the order of stage + micro-batch, of equals the later
/// stage first, so that early micro-batches come out early.
Table forward_only(const Placement& placement);
/// All forwards, in the order of forward_only(), then all backwards in the reverse order, so that each stage
/// takes the last micro-batch first (Huang et al., GPipe, 2019).
Table gpipe(const Placement& placement);
/// One stage a rank; rank r keeps at most ranks − r micro-batches alive (Narayanan et al., PipeDream-Flush,
/// 2020).
Table one_forward_one_backward(Shape shape);
/// The same idea for stages anywhere: a backward that is ready goes before any forward, and at most
/// `max_in_flight` micro-batches are between their first forward and their last backward (0: as many as
/// there are ranks). Near the end of the model fewer keep a stage busy: with n = max(max_in_flight, stages),
/// stage s holds at most n − s. What is ready when is taken from unit costs (a forward 1, a backward 2).
/// Equal to the one above for its shapes.
Table one_forward_one_backward(const Placement& placement, int max_in_flight = 0);
/// Several stages a rank; the bubble shrinks by their number (Narayanan et al., Megatron-LM, 2021). Needs
/// micro_batches to be a multiple of ranks, unless there are fewer than ranks.
Table interleaved(Shape shape);
/// All micro-batches through one stage of a rank before its next stage; backwards in the reverse order
/// (Lamy-Poirier, 2022).
Table looped_breadth_first(Shape shape);

/// What the tasks of one stage cost, and what a micro-batch of it keeps in memory (any unit) from the start
/// of its forward to the end of its kBackward or kWeightGradient; one that never goes backwards keeps
/// nothing. kBackward takes input_gradient + weight_gradient. What the stage sends to another rank, either
/// way, arrives `transfer` later; the rank goes on meanwhile.
struct Costs {
  Duration forward{1};
  Duration input_gradient{1};
  Duration weight_gradient{1};
  Duration transfer{0};
  double activation = 1;
};

/// When a task ran, in a simulated or in a measured step, from the step's start.
struct ActionSpan {
  Action task;
  Duration start{0};
  Duration end{0};
};

/// A simulated or measured step, by rank.
struct Timeline {
  std::string name;
  std::vector<std::vector<ActionSpan>> spans;
  Duration makespan{0};
  std::vector<Duration> idle;     ///< between 0 and the makespan
  std::vector<double> peak_live;  ///< the most activation held at once
  /// How much activation a rank holds after each of its spans; as long as `spans`.
  std::vector<std::vector<double>> live;
};

/// Throws Error{kInvalid} unless every micro-batch passes every stage forwards exactly once and, if it goes
/// backwards anywhere, backwards exactly once (kBackward, or kInputGradient and kWeightGradient), every task
/// is on its stage's rank, and no rank waits for ever; names the rank, the task and what it waits for.
void validate(const Table& table);

/// Runs a table on a virtual clock; `costs` holds one entry a stage, or one for all. Throws as validate()
/// does.
Timeline simulate(const Table& table, const std::vector<Costs>& costs);

/// What the tasks of each of `stages` stages took on average in a measured step: the costs to simulate its
/// plan with. kBackward counts as an input gradient.
std::vector<Costs> mean_costs(const Timeline& measured, int stages);

/// A text grid, a line a rank and a column a time slot of the shortest task, for terminals and tests. Throws
/// Error{kInvalid} that names the field of a timeline that contradicts itself.
std::string draw_text(const Timeline& timeline);

/// A self-contained SVG: one grid for each timeline, one row a rank, tasks coloured by kind and numbered by
/// micro-batch, idle time hatched, below each row its memory curve. A second timeline (the measured step) is
/// drawn under the first (the plan) on the same time scale. Throws as draw_text() does, and for no timeline.
std::string draw_svg(const std::vector<Timeline>& timelines);

}  // namespace torchspan::schedule
