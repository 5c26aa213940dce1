#pragma once

namespace torchspan::testing {

/// Whether this build has LibTorch's Gloo, which groups over several hosts need.
#if defined(TORCHSPAN_GLOO)
inline constexpr bool kHasGloo = true;
#else
inline constexpr bool kHasGloo = false;
#endif

}  // namespace torchspan::testing
