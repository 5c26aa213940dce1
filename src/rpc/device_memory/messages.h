#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/rpc/message.h>

namespace torchspan::rpc {

enum class OfferOutcome : std::uint8_t {
  kAccepted,
  kUnwanted,  ///< the receiver has no use for the memory, or cannot map any
  kFailed,    ///< mapping it failed
  /// No memory is needed: the connection on which the offer came carries device memory. The route of the offer is then
  /// net::Segment::device_target.
  kByConnection,
};

/// What the receiver of an offer does with it.
struct OfferAnswer {
  static constexpr FixedString kWireName = "rpc.OfferAnswer";
  OfferOutcome outcome = OfferOutcome::kFailed;
  std::string reason;  ///< unless accepted
};

/// Offers memory on a device of the sender, through which its tensors reach a device of the receiver.
struct OfferDeviceMemory {
  static constexpr wire::MessageType kType{0x0030};
  static constexpr std::string_view kName = "device_memory.offer";
  static constexpr FixedString kWireName = "rpc.OfferDeviceMemory";
  using Reply = OfferAnswer;
  std::uint32_t route = 0;  ///< the sender's number for this memory
  std::string from;         ///< the sender's device
  std::string to;           ///< the receiver's; "cpu": where the receiver's device map places results
  std::uint64_t bytes = 0;
  std::string handle;  ///< in the device's own format; empty in the first offer, which only asks
};

/// Returns memory whose tensors the receiver has copied; it may arrive twice.
struct ReleaseDeviceMemory {
  static constexpr wire::MessageType kType{0x0031};
  static constexpr std::string_view kName = "device_memory.release";
  static constexpr FixedString kWireName = "rpc.ReleaseDeviceMemory";
  using Reply = Unit;
  std::uint32_t route = 0;
  std::vector<std::uint64_t> leases;
};

/// Names the blob of a message that has tensors in offered memory: a SharedPlaces.
inline constexpr const char* kDeviceMemoryBlob = "rpc.device_memory";

/// Where a tensor of a message is.
struct SharedPlace {
  static constexpr FixedString kWireName = "rpc.SharedPlace";
  std::uint32_t segment = 0;  ///< its place among the message's segments, these included
  std::uint32_t route = 0;
  std::uint64_t lease = 0;  ///< the receiver returns it by ReleaseDeviceMemory
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// The tensors of a message that are in offered memory, by ascending segment.
struct SharedPlaces {
  static constexpr FixedString kWireName = "rpc.SharedPlaces";
  std::vector<SharedPlace> all;
};

}  // namespace torchspan::rpc
