// What every torch-side source includes anyway, and no more.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>  // first: clang in C++20 mode needs it before the other LibTorch headers
#include <ATen/core/Tensor.h>
