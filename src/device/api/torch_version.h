#pragma once
#include <torch/version.h>

#ifndef TORCHSPAN_LIBTORCH_AT_LEAST
#define TORCHSPAN_LIBTORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
#endif
