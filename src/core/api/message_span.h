#pragma once
#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// A send() or recv() of a group that waited for the other rank: id = number of the message between the two ranks, peer =
/// the other rank, none for a recv() from any rank; part = the group's number; bytes of the tensor.
inline constexpr SpanKind kMessageSpan{12};

}  // namespace torchspan
