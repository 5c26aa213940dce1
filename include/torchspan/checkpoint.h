#pragma once
// CheckpointManager, which saves and restores the state of all ranks; model folders and safetensors files.
#include <torchspan/checkpoint/manager.h>
#include <torchspan/checkpoint/model_folder.h>
#include <torchspan/checkpoint/sources.h>
#include <torchspan/checkpoint/state.h>
