#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

/// Numbers a rank's actions of one direction: `group` micro-batches pass its first stage, then its second, and
/// so on through all stages; then the next `group` micro-batches follow. Backwards take the stages in
/// reverse.
Action numbered(ActionKind kind, int rank, const Shape& shape, int number) {
  const int group = std::min(shape.ranks, shape.micro_batches);
  const int round = group * shape.stages_per_rank;
  const int forward_chunk = number % round / group;
  const int chunk = kind == ActionKind::kForward ? forward_chunk : shape.stages_per_rank - 1 - forward_chunk;
  return {kind, chunk * shape.ranks + rank, number / round * group + number % group};
}

void check_interleaved(const Shape& shape) {
  check(shape, "interleaved");
  if (shape.micro_batches > shape.ranks && shape.micro_batches % shape.ranks != 0) {
    const int below = shape.micro_batches / shape.ranks * shape.ranks;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("interleaved: micro_batches is {}, which is not a multiple of the {} ranks; use {} or {}",
                    shape.micro_batches, shape.ranks, below, below + shape.ranks));
  }
}

}  // namespace

Table interleaved(Shape shape) {
  check_interleaved(shape);
  Table table = empty_table("interleaved", looped(shape), shape.ranks);
  const int group = std::min(shape.ranks, shape.micro_batches);
  const int all = shape.micro_batches * shape.stages_per_rank;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    // With several stages per rank, a micro-batch returns after `ranks` steps, not at once: a rank runs twice
    // as many forwards ahead as with one stage.
    const int hops = shape.ranks - 1 - rank;
    const int ahead = shape.stages_per_rank == 1 ? hops : 2 * hops + (shape.stages_per_rank - 1) * group;
    const int warm_up = std::min(all, ahead);
    auto& actions = table.actions[static_cast<std::size_t>(rank)];
    for (int number = 0; number < all + warm_up; ++number) {
      if (number < all) actions.push_back(numbered(ActionKind::kForward, rank, shape, number));
      if (number >= warm_up)
        actions.push_back(numbered(ActionKind::kBackward, rank, shape, number - warm_up));
    }
  }
  return table;
}

}  // namespace torchspan::schedule
