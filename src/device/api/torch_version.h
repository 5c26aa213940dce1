#pragma once
#include <torch/version.h>

/// Whether this is compiled with LibTorch `major`.`minor` or newer.
#define TORCHSPAN_LIBTORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
