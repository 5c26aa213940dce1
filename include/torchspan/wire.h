#pragma once
// Types that can be sent, and how to make a type sendable: torchspan::Wire.
#include <torchspan/wire/containers.h>
#include <torchspan/wire/torch_types.h>
#include <torchspan/wire/types.h>
#include <torchspan/wire/wire.h>
