// Placement of tensors from devices other than the CPU. tests/parity/rpc_devices.cpp does the same over real
// tensors of such devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "wire/api/tensors.h"
#include "wire/tensor_block.h"
#include "wire/wire_test_util.h"

namespace torchspan::wire::devices_test {
namespace {

TEST(Devices, ATensorOfAnotherDeviceArrivesWhereThePlacementSays) {
  // The metadata that a worker with a GPU sends: one float, flagged as sent from cuda:1.
  ByteWriter metadata;
  metadata.put(std::uint32_t{1});
  metadata.put(std::uint8_t{1});
  metadata.put(std::uint8_t{2});
  metadata.put_string("cuda:1");
  metadata.put(std::uint8_t{6}), metadata.put(std::uint8_t{0}), metadata.put(std::uint8_t{0});
  const float number = 2.5f;
  const Segment segment{reinterpret_cast<const std::byte*>(&number), sizeof number, nullptr};
  std::vector<Buffer> buffers = deliver(std::span(&segment, 1));
  EXPECT_TRUE(unpack(metadata.bytes(), buffers)[0].is_cpu());
  buffers = deliver(std::span(&segment, 1));
  std::string asked;
  const auto place = [&](c10::Device device) {
    asked = device.str();
    return c10::Device("meta");
  };
  EXPECT_TRUE(unpack(metadata.bytes(), buffers, {.place = place})[0].is_meta());
  EXPECT_EQ(asked, "cuda:1");
}

/// The sender still holds the message when the receiver has the tensor.
TEST(Devices, ATensorOfThisProcessIsMovedToItsReceiver) {
  const auto sent = std::make_shared<at::Tensor>(torch::ones({2, 3}));
  Buffer buffer{static_cast<std::byte*>(sent->data_ptr()), sent->nbytes(), sent};
  const DeviceSegment segment{0, c10::kCPU, DeviceSegment::Memory::kTensor};
  BufferQueue buffers(std::span(&buffer, 1), std::span(&segment, 1));
  const at::Tensor got =
      take_device_tensor(BlockShape{at::kFloat, at::DimVector{2, 3}, at::DimVector{3, 1}}, buffers);
  EXPECT_EQ(got.use_count(), 1u);
  EXPECT_FALSE(sent->defined());
  EXPECT_TRUE(at::equal(got, torch::ones({2, 3})));
}

TEST(Devices, ATensorIsPlacedOnTheRequestedDeviceOrRejected) {
  const std::vector<at::Tensor> tensors{torch::ones({2}), torch::zeros({3})};
  const auto sent = [&](const char* device) {
    const auto place = [device](c10::Device here) {
      EXPECT_TRUE(here.is_cpu());
      return c10::Device(device);
    };
    const PackedTensors packed = pack(tensors, {.place = place});
    std::vector<Buffer> buffers = deliver(packed.segments);
    return unpack(packed.metadata, buffers, {.place = [](c10::Device) { return c10::Device("meta"); }});
  };
  for (const auto& [device, why] : {std::pair("xpu:3", "this process has no xpu devices"),
                                    std::pair("meta", "a meta tensor has no data")}) {
    try {
      sent(device);
      ADD_FAILURE() << "'" << device << "' was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr(device), ::testing::HasSubstr(why)));
    }
  }
  // The sender does not name the CPU: then the receiver's own placement decides.
  EXPECT_TRUE(sent("cpu")[1].is_meta());
  const auto refuse = [](c10::Device) -> c10::Device { throw Error(ErrorKind::kInvalid, "no place"); };
  try {
    pack(tensors, {.place = refuse});
    ADD_FAILURE() << "it was packed";
  } catch (const Error& error) {
    EXPECT_STREQ(error.message().c_str(), "tensor 0 of 2: no place");
  }
}

/// The host checks the indices of sparse tensors and the scales of quantized ones, and cannot read other memory.
TEST(Devices, SegmentsInDeviceMemoryAreRefusedWhereTheHostWouldReadThem) {
  const at::Tensor sparse = at::eye(3).to_sparse();
  const at::Tensor quantized = at::quantize_per_tensor(at::ones({4}), 0.5, 1, at::kQInt8);
  for (const at::Tensor& tensor : {sparse, quantized}) {
    const PackedTensors packed = pack(std::span(&tensor, 1));
    for (std::size_t index = 0; index < packed.segments.size(); ++index) {
      std::vector<Buffer> buffers = deliver(packed.segments);
      const DeviceSegment lie{index, c10::Device(c10::kCUDA, 0)};
      device::CopyStreams copies;
      try {
        unpack(packed.metadata, buffers, {.copies = &copies, .on_device = std::span(&lie, 1)});
        ADD_FAILURE() << "segment " << index << " was read";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("device memory"));
      }
    }
  }
}

TEST(Devices, SegmentsInDeviceMemoryNeedStreams) {
  const at::Tensor tensor = at::ones({4});
  const PackedTensors packed = pack(std::span(&tensor, 1));
  std::vector<Buffer> buffers = deliver(packed.segments);
  const DeviceSegment lie{0, c10::Device(c10::kCUDA, 0)};
  EXPECT_EQ(kind_of([&] { unpack(packed.metadata, buffers, {.on_device = std::span(&lie, 1)}); }),
            ErrorKind::kInvalid);
}

}  // namespace
}  // namespace torchspan::wire::devices_test
