#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include <torchspan/detail/rpc/message.h>

namespace torchspan::rpc {

/// Carries one part of a large tensor as its only segment, before the message that has the tensor, on the same
/// connection. Parts of a tensor arrive in order. Without a segment, the rest does not follow.
struct TensorPart {
  static constexpr wire::MessageType kType{0x0032};
  static constexpr std::string_view kName = "tensor_parts.part";
  static constexpr FixedString kWireName = "rpc.TensorPart";
  using Reply = Unit;
  std::uint64_t tensor = 0;  ///< the sender's number
  std::uint64_t bytes = 0;   ///< of the whole tensor
};

/// Names the blob of a message whose tensors were sent in parts: a SplitPlaces.
inline constexpr const char* kTensorPartsBlob = "rpc.tensor_parts";

/// Which segment of a message was sent in parts.
struct SplitPlace {
  static constexpr FixedString kWireName = "rpc.SplitPlace";
  std::uint32_t segment = 0;  ///< its place among the message's segments, these included
  std::uint64_t tensor = 0;   ///< TensorPart::tensor
};

/// The tensors of a message that were sent in parts, by ascending segment.
struct SplitPlaces {
  static constexpr FixedString kWireName = "rpc.SplitPlaces";
  std::vector<SplitPlace> all;
};

}  // namespace torchspan::rpc
