// For sources that use modules, optimizers or the whole of LibTorch's C++ front end.
#pragma once
#include <ATen/core/ivalue.h>  // first: clang in C++20 mode needs it before the other LibTorch headers
#include <torch/torch.h>
