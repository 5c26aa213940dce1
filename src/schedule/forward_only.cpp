#include "schedule/tables.h"

namespace torchspan::schedule {

Table forward_only(const Placement& placement) {
  const int ranks = check(placement, "forward_only");
  Table table = empty_table("forward-only", placement, ranks);
  append_forwards(table);
  return table;
}

}  // namespace torchspan::schedule
