#pragma once
#if __has_include(<source_location>)
#include <source_location>
#endif
#if !defined(__cpp_lib_source_location)
#include <experimental/source_location>
#endif
#include <string>
#include <string_view>

namespace torchspan {

/// Source location captured by a default argument; clang 14 has only the experimental one.
#if defined(__cpp_lib_source_location)
using SourceLocation = std::source_location;
#else
using SourceLocation = std::experimental::source_location;
#endif

/// File name of a path; views the same text.
std::string_view file_of(std::string_view path);
/// "train.cpp:41"; empty if unknown.
std::string site_text(const SourceLocation& site);

}  // namespace torchspan
