#pragma once
#include <torchspan/state/source.h>

/// The interface through which objects list their state, under the names that programs use.
namespace torchspan::checkpoint {

using state::RemoteValue;
using state::SourcePtr;
using state::StateReader;
using state::StateSource;
using state::StateTensor;
using state::StateWriter;
using state::Value;

}  // namespace torchspan::checkpoint
