#pragma once
#include <functional>
#include <memory>
#include <vector>

#include <torchspan/core/bytes.h>

#include "collective/shm/hub.h"

namespace torchspan::collective::shm {

/// Everybody's bytes, by rank of the group to be: the channel over which its members know each other already.
/// Throws what keeps somebody from answering.
using Gather = std::function<std::vector<Bytes>(BytesView mine)>;

struct MeetingPlan {
  std::vector<Person> people;  ///< by rank of the group to be
  int self = 0;
  std::uint64_t shared_bytes = 0;
  Deadline deadline;
};

/// Members of one host pass each other their memory: all dial rank 0, which passes everybody's on. Proof that
/// it is one host is that this works at all: a Unix socket without a name in any folder, whose ends check
/// each other's user and a random token that only `gather` told. Each keeps its connection with rank 0, as a
/// sign of life. Throws, on every rank alike, kUnsupported when somebody could not be reached that way,
/// saying who and why.
std::shared_ptr<Hub> meet(Runtime& runtime, const MeetingPlan& plan, const Gather& gather);

}  // namespace torchspan::collective::shm
