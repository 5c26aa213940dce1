#pragma once
#include <torchspan/core/error.h>
#include <torchspan/wire/containers.h>

namespace torchspan {

template <>
struct Wire<RemoteFrame> : WireStruct<RemoteFrame, "RemoteFrame", &RemoteFrame::worker, &RemoteFrame::call,
                                      &RemoteFrame::type, &RemoteFrame::text> {};

/// An Error with all its parts. A kind unknown to this program keeps its number.
template <>
struct Wire<Error> {
  static std::string name() { return "Error"; }
  static void encode(wire::Encoder& encoder, const Error& error);
  static Error decode(wire::Decoder& decoder);
};

}  // namespace torchspan
