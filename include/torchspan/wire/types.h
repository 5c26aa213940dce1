#pragma once
// All types with a predefined Wire.
#include <torchspan/detail/wire/errors.h>
#include <torchspan/wire/containers.h>
#include <torchspan/wire/torch_types.h>
