#pragma once
// CheckpointManager: saves and restores the state of all ranks.
#include <torchspan/checkpoint/manager.h>
#include <torchspan/checkpoint/sources.h>
#include <torchspan/checkpoint/state.h>
