#include "schedule/tables.h"

namespace torchspan::schedule {

Table looped_breadth_first(Shape shape) {
  check(shape, "looped_breadth_first");
  Table table = empty_table("bfs", looped(shape), shape.ranks);
  const int stages = table.stages();
  for (int stage = 0; stage < stages; ++stage) {
    auto& actions = table.actions[static_cast<std::size_t>(stage % shape.ranks)];
    for (int i = 0; i < shape.micro_batches; ++i) actions.push_back({ActionKind::kForward, stage, i});
  }
  for (int stage = stages - 1; stage >= 0; --stage) {
    auto& actions = table.actions[static_cast<std::size_t>(stage % shape.ranks)];
    for (int i = shape.micro_batches - 1; i >= 0; --i) actions.push_back({ActionKind::kBackward, stage, i});
  }
  return table;
}

}  // namespace torchspan::schedule
