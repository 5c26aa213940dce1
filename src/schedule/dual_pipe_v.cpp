#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "schedule/sequence.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
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
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("dual_pipe_v: micro_batches is {}; {} ranks need at least {}, one for each stage. "
                    "Use zero_bubble_v() for fewer",
                    shape.micro_batches, shape.ranks, 2 * shape.ranks));
  }
  Table table = empty_table("dualpipev", v_shaped(shape), shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) DualPipeV(table, rank).write();
  return table;
}

}  // namespace torchspan::schedule
