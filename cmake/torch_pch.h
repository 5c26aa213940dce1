// What nearly every torch-side source needs; parsed once per build.
#pragma once
#include <ATen/core/ivalue.h>  // first: clang in C++20 mode needs it before the other LibTorch headers
#include <torch/torch.h>
