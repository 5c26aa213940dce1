#pragma once
#include <memory>
#include <vector>

#include <torchspan/rendezvous/membership.h>

#include "collective/serial/wire.h"

namespace torchspan::collective {

/// Collective over `ranks`: LibTorch's Gloo between them, which finds its peers through the world's
/// membership. On one host it listens on the loopback interface only. Null for one rank alone. Throws
/// kUnsupported in a build without Gloo's headers.
std::unique_ptr<Wire> connect_gloo(Runtime& runtime, rendezvous::Membership& world,
                                   const std::vector<int>& ranks, Duration timeout);

}  // namespace torchspan::collective
