#pragma once
#include <memory>
#include <string>

#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/wire.h>

/// For messages of extensions that carry references to values of any type.
template <>
struct torchspan::Wire<torchspan::rpc::ReferencePtr> {
  static std::string name() { return "Reference"; }
  static void encode(wire::Encoder& encoder, const rpc::ReferencePtr& value) { encoder.reference(value); }
  static rpc::ReferencePtr decode(wire::Decoder& decoder) {
    return std::static_pointer_cast<rpc::Reference>(decoder.reference());
  }
};
