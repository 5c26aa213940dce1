#pragma once
#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include <torchspan/detail/wire/frame.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::testing {

inline net::SimPredicate requests_of(wire::MessageType type) {
  return [type](const net::SimMessage& message) { return request_type(message) == type; };
}

/// The next call, or reply to one, that the worker called `from` sends to another one finds no memory.
inline void run_out_of_memory(SimCluster& world, const std::string& from) {
  world.network().block(
      [from, due = std::make_shared<std::atomic<bool>>(true)](const net::SimMessage& message) {
        if (message.from != "sim:" + from) return false;
        if (wire::decode_frame(message.header).header.type != rpc::kCallFunction) return false;
        if (due->exchange(false)) throw std::bad_alloc();
        return false;
      });
}

}  // namespace torchspan::testing
