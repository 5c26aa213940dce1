#pragma once
#include <cstdint>

#include <torch/types.h>

#include <torchspan/wire.h>
