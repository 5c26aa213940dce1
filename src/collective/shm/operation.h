#pragma once
#include <exception>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/function.h>

#include "collective/shm/control.h"
#include "collective/shm/op_coroutine.h"

namespace torchspan::collective::shm {

/// Some memory of this process; several in a row are one contribution.
struct Piece {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

/// One collective as this rank called it, from the call to the completion of its future.
struct Operation {
  Call call;
  Bytes note;                 ///< shapes, written into the slot
  std::vector<Piece> pieces;  ///< what this rank contributes: call.bytes bytes
  /// Called once everybody's call is there, and agrees: does what can be done at once and returns the rest.
  /// Throws kInvalid for calls that make no sense.
  UniqueFunction<OpCoroutine()> begin;
  UniqueFunction<void()> succeed;
  UniqueFunction<void(std::exception_ptr)> fail;
  Deadline deadline;  ///< never: as long as the group waits for late ranks
  TimePoint issued;

  bool begun = false;
  OpCoroutine script;
};

/// "all_reduce(float [3, 4], sum)".
std::string describe(const Call& call);
/// "all_reduce(float [3, 4], sum), call 7 of the group".
std::string describe_numbered(const Call& call);

/// Whether two ranks called the same thing, as far as that verb demands. A sparse tensor without entries
/// agrees with every number of sparse dimensions.
bool agree(const Call& a, const Call& b);

}  // namespace torchspan::collective::shm
