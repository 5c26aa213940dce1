#include "schedule/sequence.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

/// Both schedules with one stage per rank: `ahead` forwards per rank that follows, before the first backward,
/// and as many weight gradients per rank that precedes, after the last. Both are 1 (H1) or 2 (H2): the wait
/// at the start and at the end is as long, so no rank waits in between.
Table zero_bubble_of_one_stage(const std::string& name, Shape shape, int ahead) {
  Table table = empty_table(name, looped(shape), shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Sequence sequence(table, rank);
    const int warm_up = ahead * (shape.ranks - 1 - rank);
    const auto late = static_cast<std::size_t>(ahead) * static_cast<std::size_t>(rank);
    for (int i = 0; i < warm_up; ++i) sequence.forward(rank);
    for (int i = 0; i < shape.micro_batches; ++i) {
      sequence.forward(rank);
      sequence.input_gradient(rank);
      if (sequence.pending() > late) sequence.weight_gradient(rank);
    }
    while (sequence.pending() > 0) sequence.weight_gradient(rank);
  }
  return table;
}

void check_one_stage(const Shape& shape, const std::string& schedule) {
  check(shape, schedule);
  check_stages_per_rank(shape, schedule, 1, ". Use interleaved_zero_bubble() or zero_bubble() for several");
}

}  // namespace

Table zero_bubble_h1(Shape shape) {
  check_one_stage(shape, "zero_bubble_h1");
  return zero_bubble_of_one_stage("zb-h1", shape, 1);
}

Table zero_bubble_h2(Shape shape) {
  check_one_stage(shape, "zero_bubble_h2");
  return zero_bubble_of_one_stage("zb-h2", shape, 2);
}

}  // namespace torchspan::schedule
