#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "schedule/sequence.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

/// The micro-batches that pass one stage of a rank before its next stage.
int group_of_rounds(const Shape& shape) {
  const int rounds = std::max(1, shape.micro_batches / shape.ranks);
  const int over = shape.micro_batches % rounds;
  if (over != 0) {
    const int below = shape.micro_batches - over;
    throw Error(ErrorKind::kInvalid,
                fmt::format("interleaved_zero_bubble: micro_batches is {}, which is not a multiple of its {} "
                            "rounds through the {} ranks; use {} or {}",
                            shape.micro_batches, rounds, shape.ranks, below, (rounds + 1) * shape.ranks));
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

}  // namespace torchspan::schedule
