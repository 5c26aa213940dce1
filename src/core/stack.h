#pragma once
#include <string>

namespace torchspan {

/// Where the calling thread is, one indented line per frame, innermost first. Functions without an exported
/// name appear as binary+0xoffset, which addr2line understands.
std::string stack_of_this_thread();

}  // namespace torchspan
