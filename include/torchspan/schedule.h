#pragma once
// Schedules of pipelines as tables: built-in ones, search, validation, simulation, drawings, and files of other
// programs. Includes no LibTorch.
#include <compare>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>

/// Pipeline schedules as pure functions from a shape to each rank's ordered actions. No clocks, threads or
/// tensors. Functions throw Error{kInvalid} that names the parameter.
namespace torchspan::schedule {

/// What a stage does with one micro-batch. kBackward is kInputGradient and kWeightGradient in one;
/// schedules that fill the bubble split it.
enum class ActionKind : std::uint8_t { kForward, kBackward, kInputGradient, kWeightGradient };

/// One action of a schedule. Stages and micro-batches count from 0.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;
  friend auto operator<=>(const Action&, const Action&) = default;
};

/// Stage, letter (F, B, I, W) and micro-batch: "2F5".
std::string to_string(const Action& action);

/// Size of a pipeline; stage s is on rank s modulo `ranks`.
struct Shape {
  int ranks = 1;
  int micro_batches = 1;
  int stages_per_rank = 1;
};

/// Arbitrary placement of stages in model order; a rank may hold any stages, including adjacent ones.
struct Placement {
  std::vector<int> rank_of_stage;
  int micro_batches = 1;
  int ranks = 0;  ///< 0: largest entry of rank_of_stage, plus 1
};

/// Places stage s on rank s modulo ranks.
Placement looped(Shape shape);

/// Places 2 · ranks stages in a V: stage s on rank s, and from the last rank back to rank 0, so that the first
/// and the last stage share rank 0. stages_per_rank must be 2.
Placement v_shaped(Shape shape);

/// The schedule of one step: the rank of each stage, and each rank's actions in execution order.
struct Table {
  std::string name;
  std::vector<int> rank_of_stage;
  int micro_batches = 1;
  std::vector<std::vector<Action>> actions;  ///< by rank
  int ranks() const { return static_cast<int>(actions.size()); }
  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};

/// Forwards only, for inference. Each rank runs them by stage + micro-batch and, if equal, the later stage
/// first, so that early micro-batches finish early.
Table forward_only(const Placement& placement);
/// All forwards in the order of forward_only(), then all backwards in reverse order, so that each stage
/// takes the last micro-batch first (Huang et al., GPipe, 2019).
Table gpipe(const Placement& placement);
/// One stage per rank; rank r keeps at most ranks − r micro-batches alive (Narayanan et al.,
/// PipeDream-Flush, 2020).
Table one_forward_one_backward(Shape shape);
/// 1F1B for arbitrary placements: a ready backward precedes any forward, and at most `max_in_flight`
/// micro-batches (0: the number of ranks) are between their first forward and their last backward. Stage s
/// holds at most n − s, with n = max(max_in_flight, stages). Readiness assumes unit costs (forward 1,
/// backward 2). Equal to one_forward_one_backward(Shape) for its placements.
Table one_forward_one_backward(const Placement& placement, int max_in_flight = 0);
/// Several stages per rank; divides the bubble by their number (Narayanan et al., Megatron-LM, 2021).
/// micro_batches must be a multiple of ranks, or less than ranks.
Table interleaved(Shape shape);
/// Runs all micro-batches through one stage of a rank before its next stage; backwards in reverse order
/// (Lamy-Poirier, 2022).
Table looped_breadth_first(Shape shape);

/// Costs of one stage: time of its actions, and memory per micro-batch (any unit): `activation` from the
/// start of its forward to the end of its kBackward or kInputGradient, `weight_input` from then to the end of
/// its kWeightGradient, and `recomputation` in addition while its kBackward or kInputGradient runs, or its
/// kWeightGradient if input_gradient is 0; a micro-batch without backward holds none. kBackward takes input_gradient +
/// weight_gradient. Data sent to another rank arrives `transfer` later; the sending rank continues meanwhile.
struct Costs {
  Duration forward{1};
  Duration input_gradient{1};
  Duration weight_gradient{1};
  Duration transfer{0};
  double activation = 1;
  std::optional<double> weight_input =
      std::nullopt;          ///< unset: `activation`, nothing is freed between I and W
  double recomputation = 0;  ///< of a forward that is repeated for its backward (activation checkpointing)
};

/// 1F1B with split backwards: rank r keeps up to r weight gradients and runs them where 1F1B is idle. All
/// ranks keep `ranks` micro-batches (Qi et al., Zero Bubble Pipeline Parallelism, 2023: ZB-H1).
Table zero_bubble_h1(Shape shape);
/// The same with 2 · (ranks − r) − 1 forwards before the first backward. With equal costs and at least
/// 2 · ranks − 1 micro-batches, no rank is idle between its first and its last action; all ranks keep up to
/// 2 · ranks − 1 micro-batches (Qi et al., 2023: ZB-H2).
Table zero_bubble_h2(Shape shape);
/// ZB-H1 with several stages per rank (Qi et al., 2023: ZB1P; ScheduleInterleavedZeroBubble in PyTorch).
/// micro_batches must be a multiple of max(1, micro_batches / ranks), its number of rounds.
Table interleaved_zero_bubble(Shape shape);
/// Two stages per rank in v_shaped(). With equal costs and at least 2 · ranks − 1 micro-batches, no rank is
/// idle between its first and its last action, and all ranks keep at most `ranks` micro-batches (Qi et al.,
/// Pipeline Parallelism with Controllable Memory, 2024: V-ZB; ScheduleZBVZeroBubble in PyTorch).
Table zero_bubble_v(Shape shape);
/// Two stages per rank in v_shaped(), and pairs of a forward and a whole backward that a runtime may overlap;
/// the table lists both in turn. At least 2 · ranks micro-batches (DeepSeek-AI, DeepSeek-V3 Technical Report,
/// 2024, and DualPipeV, 2025; ScheduleDualPipeV in PyTorch).
Table dual_pipe_v(Shape shape);
/// Searches for a short step with split backwards for any placement, costs (one for each stage, or one for
/// all) and memory limit of a rank (in the unit of Costs::activation): the heuristic of Qi et al. (2023,
/// section 4.1) with several settings, and ZB-H1, ZB-H2 or ZBV; the best is kept. The limit must allow one
/// micro-batch.
Table zero_bubble(const Placement& placement, const std::vector<Costs>& costs,
                  double memory_limit = std::numeric_limits<double>::infinity());

/// Start and end of an action in a simulated or measured step, from the step's start.
struct ActionSpan {
  Action action;
  Duration start{0};
  Duration end{0};
};

/// A simulated or measured step, by rank.
struct Timeline {
  std::string name;
  std::vector<std::vector<ActionSpan>> spans;
  Duration makespan{0};
  std::vector<Duration> idle;     ///< between 0 and the makespan
  std::vector<double> peak_live;  ///< maximum activation held at once
  /// Activation that a rank holds after each of its spans; same shape as `spans`.
  std::vector<std::vector<double>> live;
  /// The part of `live` that is kept for weight gradients (Costs::weight_input), and its maximum by rank; empty
  /// if not known.
  std::vector<std::vector<double>> weight_inputs;
  std::vector<double> peak_weight_inputs;
};

/// Idle share of all ranks' time from 0 to the makespan.
double idle_share(const Timeline& timeline);

/// Time per step if steps follow each other without a barrier: the longest time from a rank's first to its
/// last action.
Duration step_period(const Timeline& timeline);

/// Share of step_period() in which a rank is idle, averaged over all ranks: the bubble rate of Qi et al.
/// (2023), who let each rank start its next step when its own actions have ended.
double bubble_share(const Timeline& timeline);

/// Throws Error{kInvalid} unless each micro-batch runs forward exactly once on every stage and, if it has
/// any backward, backward exactly once (kBackward, or kInputGradient and kWeightGradient), each action is
/// on its stage's rank, and no rank deadlocks. The error names the rank, the action and what it waits for.
void validate(const Table& table);

/// Simulates a table on a virtual clock; `costs` has one entry per stage, or one for all. Throws as
/// validate().
Timeline simulate(const Table& table, const std::vector<Costs>& costs);

/// Average duration of the actions of each of `stages` stages in a measured step, as costs for simulate().
/// kBackward counts as the input gradient of a stage of which no backward is split.
std::vector<Costs> mean_costs(const Timeline& measured, int stages);

/// Text grid with one line per rank and one column per slot of the shortest action, for terminals and
/// tests. Throws Error{kInvalid} that names the inconsistent field of a timeline.
std::string draw_text(const Timeline& timeline);

/// Self-contained SVG with one grid per timeline and one row per rank: actions colored by kind and numbered
/// by micro-batch, idle time hatched, a memory curve under each row. Several timelines (a plan and its
/// measured step) share one time scale. Throws as draw_text(), and if `timelines` is empty.
std::string draw_svg(const std::vector<Timeline>& timelines);

/// The pipeline to find a schedule for.
struct CompareOptions {
  int ranks = 1;
  int micro_batches = 1;
  /// Costs of one micro-batch through all layers of a rank: one entry for all ranks, or one for each. A
  /// schedule with several stages per rank divides them evenly; transfer times do not change.
  std::vector<Costs> costs = {Costs{}};
  /// Memory limit of a rank, in the unit of Costs::activation.
  double memory_limit = std::numeric_limits<double>::infinity();
};

/// A schedule and its simulated step.
struct Candidate {
  Table table;
  int stages_per_rank = 1;
  Timeline timeline;
  bool fits = true;  ///< in the memory limit
};

/// The schedules for a pipeline, best first, and why others are left out.
struct Comparison {
  std::vector<Candidate> candidates;
  std::vector<std::string> undefined;  ///< error texts of schedules that are not defined for the pipeline
};

/// Simulates each schedule that is defined for the pipeline, with one and two stages per rank, and
/// zero_bubble() for its memory limit. Those that fit come first; then the shortest step, the shortest
/// step_period(), the least memory. Throws Error{kInvalid} that names the field, or if the limit is too small
/// for one micro-batch.
Comparison compare(const CompareOptions& options);

/// Divides the costs of each rank (one entry for all, or one for each) evenly among its stages; returns one
/// entry per stage.
std::vector<Costs> divide_costs(const std::vector<Costs>& by_rank, const std::vector<int>& rank_of_stage);

/// The unit of Costs::activation and the other memory of a list of costs.
enum class MemoryUnit : std::uint8_t { kAny, kBytes };

/// Costs as JSON, for `torchspan schedule best --costs-file`: milliseconds and memory by stage.
std::string costs_json(const std::vector<Costs>& costs, MemoryUnit unit = MemoryUnit::kAny);

}  // namespace torchspan::schedule

/// Schedules as text in the CSV format of torch.distributed.pipelining: one line per rank, one cell per action.
namespace torchspan::schedule {

/// What a cell says. Beyond ActionKind: nothing, parameters gathered and freed again (FSDP), gradients reduced,
/// activations (F) and their gradients (B) sent and received, the wait for a send, two actions that overlap.
enum class CellKind : std::uint8_t {
  kIdle,
  kForward,
  kBackward,
  kInputGradient,
  kWeightGradient,
  kUnshard,
  kReshard,
  kReduceGradient,
  kWaitReduceGradient,
  kSendForward,
  kReceiveForward,
  kSendBackward,
  kReceiveBackward,
  kWaitSendForward,
  kWaitSendBackward,
  kOverlap,
};

/// One cell: "2F5", "0SEND_F1", "3RESHARD" (no micro-batch), "" (idle) or "(0F8;7B0)OVERLAP_F_B" (`parts`).
struct Cell {
  CellKind kind = CellKind::kIdle;
  int stage = 0;
  std::optional<int> micro_batch = std::nullopt;
  std::vector<Cell> parts = {};
  friend bool operator==(const Cell&, const Cell&) = default;
};

/// A parsed file: cells by rank.
struct Sheet {
  std::vector<std::vector<Cell>> rows;
  std::string line_end = "\r\n";
  friend bool operator==(const Sheet&, const Sheet&) = default;
};

/// Parses a file that PyTorch's `_dump_csv` writes, with or without communication, also if a spreadsheet program has
/// put a byte order mark before it. Throws Error{kInvalid} that names the row and the column (from 1) of the first
/// wrong cell.
Sheet parse_csv(std::string_view text);

/// Writes a sheet as PyTorch does. A file that parse_csv() read comes out unchanged, if all its lines end
/// alike and it has no byte order mark, quotes or blanks that PyTorch would not write.
std::string to_csv(const Sheet& sheet);

/// A table as a sheet, without idle cells and communication; PyTorch adds the latter when it loads the file.
Sheet to_sheet(const Table& table);

/// The computation of a sheet; rank and stages are those of the rows. Drops idle cells and communication, which
/// follow from the order of actions; of overlapping actions the first comes first. Throws Error{kInvalid}
/// that names row and column, or as validate().
Table to_table(const Sheet& sheet, std::string name);

}  // namespace torchspan::schedule
