#include "schedule/tables.h"

namespace torchspan::schedule {

Table gpipe(const Placement& placement) {
  const int ranks = check(placement, "gpipe");
  Table table = empty_table("gpipe", placement, ranks);
  append_forwards(table);
  // Backwards mirror the forwards: what was last is ready first.
  for (auto& actions : table.actions) {
    for (std::size_t left = actions.size(); left > 0; --left) {
      const Action forward = actions[left - 1];
      actions.push_back({ActionKind::kBackward, forward.stage, forward.micro_batch});
    }
  }
  return table;
}

}  // namespace torchspan::schedule
