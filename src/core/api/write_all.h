#pragma once
#include <span>
#include <string_view>

#include <torchspan/core/bytes.h>

namespace torchspan {

/// Writes all bytes to a descriptor that blocks. Returns 0, or the reason as errno.
int write_all(int descriptor, BytesView bytes);
inline int write_all(int descriptor, std::string_view text) {
  return write_all(descriptor, std::as_bytes(std::span(text)));
}

}  // namespace torchspan
