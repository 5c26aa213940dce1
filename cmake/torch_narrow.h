// What torch-side sources include anyway. A header costs a source that does not use it nothing unless it instantiates
// templates, which gcc repeats in each source: ATen's does not, torch/torch.h does.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>  // first: clang in C++20 mode needs it before the other LibTorch headers
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define NDEBUG  // for its layout: LibTorch is compiled without assertions
#include <ATen/record_function.h>
#pragma pop_macro("NDEBUG")
#include <ATen/ATen.h>
