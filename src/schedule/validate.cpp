#include "schedule/replay.h"

namespace torchspan::schedule {

void validate(const Table& table) {
  replay(table, Positions(table), [](const Action&) {});
}

}  // namespace torchspan::schedule
