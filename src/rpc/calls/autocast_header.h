#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/device/autocast.h>
#include <torchspan/wire.h>

namespace torchspan::rpc {

/// Names the blob of a request whose caller has autocast enabled.
inline constexpr const char* kAutocastBlob = "rpc.autocast";

/// A device type with autocast, as in "cuda".
struct AutocastMode {
  static constexpr FixedString kWireName = "rpc.AutocastMode";
  std::string device;
  at::ScalarType dtype = at::ScalarType::Undefined;
};

/// The caller's autocast: where it is enabled, and whether casts of parameters are kept for reuse.
struct AutocastHeader {
  static constexpr FixedString kWireName = "rpc.AutocastHeader";
  std::vector<AutocastMode> modes;
  bool cache = true;
};

/// The header of this thread; empty if autocast is disabled.
Bytes encode_autocast();
/// Throws Error{kInvalid} for malformed bytes. Leaves out device types that this LibTorch has no autocast for.
device::Autocast decode_autocast(BytesView header);

}  // namespace torchspan::rpc
