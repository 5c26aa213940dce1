#include <algorithm>

#include "schedule/sequence.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
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

}  // namespace torchspan::schedule
