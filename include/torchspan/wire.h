#pragma once
// Which types travel, and how to let one of yours travel: torchspan::Wire.
#include <torchspan/wire/containers.h>
#include <torchspan/wire/torch_types.h>
#include <torchspan/wire/types.h>
#include <torchspan/wire/wire.h>
