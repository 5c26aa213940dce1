#include "schedule/replay.h"

namespace torchspan::schedule {

void validate(const Table& table) {
  replay(table, Positions(table), [](const Task&) {});
}

}  // namespace torchspan::schedule
