#include <algorithm>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
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

namespace {

/// The micro-batches that pass one stage of a rank before its next stage.
int group_of_rounds(const Shape& shape) {
  const int rounds = std::max(1, shape.micro_batches / shape.ranks);
  const int over = shape.micro_batches % rounds;
  if (over != 0) {
    const int below = shape.micro_batches - over;
    throw_invalid(
        "interleaved_zero_bubble: micro_batches is {}, which is not a multiple of its {} rounds through the "
        "{} ranks; use {} or {}",
        shape.micro_batches, rounds, shape.ranks, below, (rounds + 1) * shape.ranks);
  }
  return shape.micro_batches / rounds;
}

}  // namespace

Table interleaved_zero_bubble(Shape shape) {
  check(shape, "interleaved_zero_bubble");
  const int group = group_of_rounds(shape);
  Table table = empty_table("interleaved-zb", looped(shape), shape.ranks);
  const int chunks = shape.stages_per_rank;
  const int all = shape.micro_batches * chunks;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Sequence sequence(table, rank);
    const auto stage = [&](int chunk) { return chunk * shape.ranks + rank; };
    const int warm_up = std::min(all, (chunks - 1) * group + shape.ranks - 1 - rank);
    for (int number = 0; number < all + warm_up; ++number) {
      if (number < all) sequence.forward(stage(number / group % chunks));
      if (number < warm_up) continue;
      sequence.input_gradient(stage(chunks - 1 - (number - warm_up) / group % chunks));
      if (sequence.pending() > static_cast<std::size_t>(rank)) sequence.oldest_weight_gradient();
    }
    while (sequence.pending() > 0) sequence.oldest_weight_gradient();
  }
  return table;
}

namespace {

/// The order of one rank. `down` is its stage in the first half of the V, `up` its stage in the second.
class ZeroBubbleV {
 public:
  ZeroBubbleV(Table& table, int rank)
      : sequence_(table, rank),
        ranks_(table.ranks()),
        rank_(rank),
        down_(rank),
        up_(2 * ranks_ - 1 - rank),
        // The pattern closes with at least this many; Sequence leaves out those beyond the table's.
        micro_batches_(std::max(2 * ranks_ - 1, table.micro_batches)) {}

  void write() {
    warm_up();
    while (sequence_.forwards(up_) < micro_batches_) {
      if (sequence_.forwards(down_) < micro_batches_) sequence_.forward(down_);
      both_gradients(down_);
      sequence_.forward(up_);
      both_gradients(up_);
    }
    cool_down();
  }

 private:
  /// Until the first backward arrives, the rank has 2 (ranks − rank) − 1 + 2 rank forwards to run.
  void warm_up() {
    for (int i = 2 * (ranks_ - rank_) - 1; i > 0; --i) sequence_.forward(down_);
    for (int i = rank_; i > 0; --i) {
      sequence_.forward(up_);
      sequence_.forward(down_);
    }
    for (int i = ranks_ - rank_; i > 0; --i) {
      sequence_.forward(up_);
      both_gradients(up_);
    }
  }

  /// Postpones weight gradients, as many as forwards were ahead.
  void cool_down() {
    for (int i = rank_; i > 0; --i) {
      sequence_.input_gradient(down_);
      sequence_.input_gradient(up_);
    }
    for (int i = ranks_ - rank_; i > 0; --i) both_gradients(down_);
    for (const int stage : {up_, down_}) {
      for (int i = rank_; i > 0; --i) sequence_.weight_gradient(stage);
    }
  }

  void both_gradients(int stage) {
    sequence_.input_gradient(stage);
    sequence_.weight_gradient(stage);
  }

  Sequence sequence_;
  const int ranks_;
  const int rank_;
  const int down_;
  const int up_;
  const int micro_batches_;
};

}  // namespace

Table zero_bubble_v(Shape shape) {
  check(shape, "zero_bubble_v");
  check_stages_per_rank(shape, "zero_bubble_v", 2, " in a V. Use zero_bubble() for another number");
  Table table = empty_table("zbv", v_shaped(shape), shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) ZeroBubbleV(table, rank).write();
  return table;
}

namespace {

/// The order of one rank. `down` is its stage in the first half of the V, `up` its stage in the second.
class DualPipeV {
 public:
  DualPipeV(Table& table, int rank)
      : sequence_(table, rank),
        following_(table.ranks() - 1 - rank),
        preceding_(rank),
        micro_batches_(table.micro_batches),
        down_(rank),
        up_(2 * table.ranks() - 1 - rank) {}

  void write() {
    warm_up();
    for (int i = micro_batches_ - 2 * following_ - preceding_ - 1; i > 0; --i) {
      sequence_.forward(down_);
      sequence_.backward(up_);
      sequence_.forward(up_);
      sequence_.backward(down_);
    }
    for (int i = following_; i > 0; --i) {
      sequence_.backward(up_);
      sequence_.forward(up_);
      sequence_.backward(down_);
    }
    cool_down();
  }

 private:
  void warm_up() {
    for (int i = 2 * following_; i > 0; --i) sequence_.forward(down_);
    for (int i = preceding_ + 1; i > 0; --i) {
      sequence_.forward(down_);
      sequence_.forward(up_);
    }
    for (int i = following_; i > 0; --i) {
      sequence_.input_gradient(up_);
      sequence_.oldest_weight_gradient();
      sequence_.forward(up_);
    }
  }

  /// From the middle on, backwards are split, so that the previous rank waits less.
  void cool_down() {
    const int pairs = preceding_ + 1;
    for (int number = 0; number < 2 * pairs; ++number) {
      const int stage = number % 2 == 0 ? up_ : down_;
      if (number < pairs) {
        sequence_.backward(stage);
      } else {
        sequence_.input_gradient(stage);
      }
    }
    for (int i = following_; i > 0; --i) {
      sequence_.oldest_weight_gradient();
      sequence_.input_gradient(down_);
    }
    while (sequence_.pending() > 0) sequence_.oldest_weight_gradient();
  }

  Sequence sequence_;
  const int following_;  ///< ranks after this one
  const int preceding_;
  const int micro_batches_;
  const int down_;
  const int up_;
};

}  // namespace

Table dual_pipe_v(Shape shape) {
  check(shape, "dual_pipe_v");
  check_stages_per_rank(shape, "dual_pipe_v", 2, " in a V");
  if (shape.micro_batches < 2 * shape.ranks) {
    throw_invalid(
        "dual_pipe_v: micro_batches is {}; {} ranks need at least {}, one for each stage. Use "
        "zero_bubble_v() for fewer",
        shape.micro_batches, shape.ranks, 2 * shape.ranks);
  }
  Table table = empty_table("dualpipev", v_shaped(shape), shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) DualPipeV(table, rank).write();
  return table;
}

}  // namespace torchspan::schedule
