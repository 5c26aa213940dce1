#pragma once
#include <exception>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/function.h>

#include "collective/shm/control.h"
#include "collective/shm/op_coroutine.h"
#include "collective/shm/signals.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective::shm {

/// A range of memory of this process; a contribution is a sequence of them.
struct Piece {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

/// One collective operation on this rank, from the call to the completion of its future.
struct Operation {
  Call call;
  Bytes note;                 ///< shapes, written into the slot
  std::vector<Piece> pieces;  ///< this rank's contribution: call.bytes bytes
  /// Called when the calls of all ranks have arrived and agree: does what it can at once, and returns the
  /// remaining steps. Throws kInvalid for inconsistent calls.
  UniqueFunction<OpCoroutine()> begin;
  UniqueFunction<void()> succeed;
  UniqueFunction<void(std::exception_ptr)> fail;
  Deadline deadline;  ///< never: the timeout of the group
  TimePoint issued;

  CountTarget awaited = {};  ///< what the operation waits for
  TimePoint awaited_since;
  Duration warn_after = kFirstWaitWarning;
  bool begun = false;
  OpCoroutine script;
};

/// "all_reduce(float [3, 4], sum)".
std::string describe(const Call& call);
/// "all_reduce(float [3, 4], sum), call 7 of the group".
std::string describe_numbered(const Call& call);

/// Whether two ranks' calls agree, in what their verb requires to be equal. A sparse tensor without entries
/// agrees with every number of sparse dimensions.
bool agree(const Call& a, const Call& b);

}  // namespace torchspan::collective::shm
