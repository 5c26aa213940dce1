#pragma once
#include <vector>

#include <torchspan/checkpoint.h>

#include "device/api/devices.h"

namespace torchspan::checkpoint {

/// The states of these generators, under the names of their devices. A generator that the checkpoint lacks gets a
/// seed that depends on its name, the step and its current seed.
SourcePtr rng_source_of(std::vector<device::NamedGenerator> generators);

}  // namespace torchspan::checkpoint
