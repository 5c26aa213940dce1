#pragma once
#include <cstdint>

#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// An operator that uses a parameter of a module: name of the module, id = sequence number of the first autograd node
/// that the operator creates, bytes = number of these nodes, part = LibTorch's number of the thread, peer = number of
/// the parameter within its module, plus kFirstView for a view of it.
inline constexpr SpanKind kModuleSpan{10};
inline constexpr std::int32_t kFirstView = 1 << 20;
/// An operator of LibTorch, or an autograd node. A node that a forward created: id = its sequence number, part =
/// LibTorch's number of the thread of that forward; other spans have no part.
inline constexpr SpanKind kOperatorSpan{11};

/// A send() or recv() of a group that waited for the other rank: id = number of the message between the two ranks, peer =
/// the other rank, none for a recv() from any rank; part = the group's number; bytes of the tensor.
inline constexpr SpanKind kMessageSpan{12};

}  // namespace torchspan
