#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <torchspan/core/time.h>

/// Pipeline schedules as pure functions. This room is not built yet: what follows is the interface it is
/// meant to have. Including it is harmless; calling any of its functions stops the compilation and says so.
namespace torchspan::schedule {

template <class Use>
struct Built {
  static_assert(!std::is_same_v<Use, Use>, "torchspan::schedule is not built yet: see docs/status.md");
  using Yes = int;
};
template <class Use>
using NotBuilt = typename Built<Use>::Yes;

/// What a stage does with one micro-batch. kBackward is kInputGradient and kWeightGradient in one; schedules
/// that fill the bubble split the two.
enum class TaskKind : std::uint8_t { kForward, kBackward, kInputGradient, kWeightGradient };

/// One cell of a schedule. Stages and micro-batches count from 0.
struct Task {
  TaskKind kind = TaskKind::kForward;
  int stage = 0;
  int micro_batch = 0;
};

/// How large a pipeline is: stage s lives on rank s modulo `ranks`, unless the schedule folds it into a V.
struct Shape {
  int ranks = 1;
  int micro_batches = 1;
  int stages_per_rank = 1;
};

/// A whole step: which rank owns each stage, and each rank's tasks in the order it runs them.
struct Table {
  std::string name;
  std::vector<int> rank_of_stage;
  std::vector<std::vector<Task>> tasks;
};

/// All forwards, then all backwards (Huang et al., GPipe, 2019).
template <class Use = void, NotBuilt<Use> = 0>
Table gpipe(Shape shape);
/// Each rank keeps at most ranks − rank micro-batches alive (Narayanan et al., PipeDream-Flush, 2020).
template <class Use = void, NotBuilt<Use> = 0>
Table one_forward_one_backward(Shape shape);
/// Several stages a rank; the bubble shrinks by their number (Narayanan et al., Megatron-LM, 2021).
template <class Use = void, NotBuilt<Use> = 0>
Table interleaved(Shape shape);
/// All micro-batches through one stage of a rank before its next stage (Lamy-Poirier, 2022).
template <class Use = void, NotBuilt<Use> = 0>
Table looped_breadth_first(Shape shape);
/// Weight gradients fill the bubble, with the memory of 1F1B (Qi et al., Zero Bubble, 2023: ZB-H1).
template <class Use = void, NotBuilt<Use> = 0>
Table zero_bubble(Shape shape);
/// Two stages a rank, folded into a V (Qi et al., Controllable Memory, 2024: ZB-V).
template <class Use = void, NotBuilt<Use> = 0>
Table zero_bubble_v(Shape shape);
/// Forwards and backwards of both ends at once, folded into a V (DeepSeek-AI, DualPipe, 2025).
template <class Use = void, NotBuilt<Use> = 0>
Table dual_pipe_v(Shape shape);
/// A schedule of the user's own: one line a rank, cells like "0F1" (stage 0, forward, micro-batch 1). A cell
/// that cannot be read throws Error{kInvalid} with its line and column.
template <class Use = void, NotBuilt<Use> = 0>
Table read_csv(std::string_view text);

/// What the tasks of one stage cost, and a hop between ranks.
struct Costs {
  Duration forward{1};
  Duration input_gradient{1};
  Duration weight_gradient{1};
  Duration transfer{0};
};

/// When a task ran in a simulated step.
struct Span {
  Task task;
  Duration start{0};
  Duration end{0};
};

/// A simulated step, by rank: its spans, its idle time between start and makespan, and the most micro-batches
/// whose activations it held at once.
struct Simulation {
  std::vector<std::vector<Span>> spans;
  Duration makespan{0};
  std::vector<Duration> idle;
  std::vector<int> peak_activations;
};

/// Throws Error{kInvalid} unless every micro-batch passes every stage forwards and backwards exactly once and
/// no rank waits for ever; names the rank, the task and what it waits for.
template <class Use = void, NotBuilt<Use> = 0>
void validate(const Table& table);
/// Runs a valid table on a virtual clock; `costs` holds one entry a stage.
template <class Use = void, NotBuilt<Use> = 0>
Simulation simulate(const Table& table, const std::vector<Costs>& costs);
/// A text grid, a line a rank and a column a time slot.
template <class Use = void, NotBuilt<Use> = 0>
std::string draw(const Simulation& simulation);

}  // namespace torchspan::schedule
