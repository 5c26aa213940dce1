#pragma once
#include <string>

namespace torchspan {

/// Returns the calling thread's stack, one indented line per frame, innermost first. Functions without an
/// exported name appear as binary+0xoffset, which addr2line understands.
std::string stack_of_this_thread();

}  // namespace torchspan
