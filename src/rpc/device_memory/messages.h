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
  OfferOutcome outcome = OfferOutcome::kFailed;
  std::string reason;  ///< unless accepted
};

/// Offers memory on a device of the sender, through which its tensors reach a device of the receiver.
struct OfferDeviceMemory {
  static constexpr wire::MessageType kType{0x0030};
  static constexpr std::string_view kName = "device_memory.offer";
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
  using Reply = Unit;
  std::uint32_t route = 0;
  std::vector<std::uint64_t> leases;
};

/// Names the blob of a message that has tensors in offered memory: a SharedPlaces.
inline constexpr const char* kDeviceMemoryBlob = "rpc.device_memory";

/// Where a tensor of a message is.
struct SharedPlace {
  std::uint32_t segment = 0;  ///< its place among the message's segments, these included
  std::uint32_t route = 0;
  std::uint64_t lease = 0;  ///< the receiver returns it by ReleaseDeviceMemory
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// The tensors of a message that are in offered memory, by ascending segment.
struct SharedPlaces {
  std::vector<SharedPlace> all;
};

}  // namespace torchspan::rpc

namespace torchspan {
template <>
struct Wire<rpc::OfferAnswer>
    : WireStruct<rpc::OfferAnswer, "rpc.OfferAnswer", &rpc::OfferAnswer::outcome, &rpc::OfferAnswer::reason> {
};
template <>
struct Wire<rpc::OfferDeviceMemory>
    : WireStruct<rpc::OfferDeviceMemory, "rpc.OfferDeviceMemory", &rpc::OfferDeviceMemory::route,
                 &rpc::OfferDeviceMemory::from, &rpc::OfferDeviceMemory::to, &rpc::OfferDeviceMemory::bytes,
                 &rpc::OfferDeviceMemory::handle> {};
template <>
struct Wire<rpc::ReleaseDeviceMemory>
    : WireStruct<rpc::ReleaseDeviceMemory, "rpc.ReleaseDeviceMemory", &rpc::ReleaseDeviceMemory::route,
                 &rpc::ReleaseDeviceMemory::leases> {};
template <>
struct Wire<rpc::SharedPlace>
    : WireStruct<rpc::SharedPlace, "rpc.SharedPlace", &rpc::SharedPlace::segment, &rpc::SharedPlace::route,
                 &rpc::SharedPlace::lease, &rpc::SharedPlace::offset, &rpc::SharedPlace::bytes> {};
template <>
struct Wire<rpc::SharedPlaces> : WireStruct<rpc::SharedPlaces, "rpc.SharedPlaces", &rpc::SharedPlaces::all> {
};
}  // namespace torchspan
