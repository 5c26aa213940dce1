#pragma once
#if __has_include(<source_location>)
#include <source_location>
#endif
#if !defined(__cpp_lib_source_location)
#include <experimental/source_location>
#endif

namespace torchspan {

/// A place in the program, as a default argument captures it; clang 14 has only the experimental one.
#if defined(__cpp_lib_source_location)
using SourceLocation = std::source_location;
#else
using SourceLocation = std::experimental::source_location;
#endif

}  // namespace torchspan
