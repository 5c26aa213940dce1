#pragma once
#include <exception>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/function.h>

#include "collective/shm/control.h"
#include "collective/shm/op_coroutine.h"

namespace torchspan::collective::shm {

/// A range of this process's memory; several in a row form one contribution.
struct Piece {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

/// One collective on this rank, from the call until its future completes.
struct Operation {
  Call call;
  Bytes note;                 ///< shapes, written into the slot
  std::vector<Piece> pieces;  ///< this rank's contribution: call.bytes bytes
  /// Called when the calls of all ranks have arrived and agree: does what can be done at once and returns the
  /// rest. Throws kInvalid for calls that make no sense.
  UniqueFunction<OpCoroutine()> begin;
  UniqueFunction<void()> succeed;
  UniqueFunction<void(std::exception_ptr)> fail;
  Deadline deadline;  ///< never: until the group gives up on late ranks
  TimePoint issued;

  bool begun = false;
  OpCoroutine script;
};

/// Returns "all_reduce(float [3, 4], sum)".
std::string describe(const Call& call);
/// Returns "all_reduce(float [3, 4], sum), call 7 of the group".
std::string describe_numbered(const Call& call);

/// Whether two ranks' calls match, as far as the operation requires. A sparse tensor without entries matches
/// every number of sparse dimensions.
bool agree(const Call& a, const Call& b);

}  // namespace torchspan::collective::shm
