#pragma once
#include <cstdint>

#include <torch/types.h>

#include <torchspan/wire/torch_types.h>
#include <torchspan/wire/wire.h>
