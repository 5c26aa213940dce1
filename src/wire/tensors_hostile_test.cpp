#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "wire/api/tensors.h"
#include "wire/wire_test_util.h"

namespace torchspan::wire::tensors_hostile_test {
namespace {

/// Fails unless every element that the tensor can reach lies inside its storage.
void expect_inside_storage(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (tensor.is_sparse()) {
    expect_inside_storage(tensor._indices());
    expect_inside_storage(tensor._values());
    const at::Tensor indices = tensor._indices();
    for (std::int64_t d = 0; indices.numel() > 0 && d < tensor.sparse_dim(); ++d) {
      EXPECT_GE(indices[d].min().item<std::int64_t>(), 0);
      EXPECT_LT(indices[d].max().item<std::int64_t>(), tensor.size(d));
    }
    return;
  }
  __int128 last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    ASSERT_GE(tensor.size(d), 0);
    if (tensor.size(d) == 0) return;
    last += static_cast<__int128>(tensor.size(d) - 1) * tensor.stride(d);
  }
  ASSERT_GE(last, 0);
  const int packed = tensor.scalar_type() == at::kQUInt4x2 ? 2 : 1;
  ASSERT_LE((last / packed + 1) * tensor.element_size(), tensor.storage().nbytes());
  std::int64_t sum = 0;  // reads every byte, so that AddressSanitizer sees it
  const auto* bytes = static_cast<const char*>(tensor.data_ptr());
  for (std::size_t i = 0; i < tensor.storage().nbytes(); ++i) sum += bytes[i];
  EXPECT_NE(sum, std::numeric_limits<std::int64_t>::min());
}

std::vector<at::Tensor> varied_tensors() {
  const at::Tensor base = torch::randn({4, 6});
  const at::Tensor indices = torch::tensor({{0, 1, 2}, {1, 0, 3}}, at::kLong);
  const at::Tensor sparse = at::sparse_coo_tensor(indices, torch::randn({3, 2}), {3, 5, 2});
  const at::Tensor scales = torch::tensor({0.1, 0.2, 0.3, 0.4}, at::kDouble);
  return {
      base.requires_grad_(),
      base.detach().t(),
      at::Tensor(),
      torch::ones({1}, at::kHalf).expand({9}),
      torch::zeros({0, 3}),
      sparse,
      sparse.coalesce(),
      at::quantize_per_tensor(torch::randn({4}), 0.1, 3, at::kQInt8),
      at::quantize_per_channel(torch::randn({4, 2}), scales, torch::zeros({4}, at::kLong), 0, at::kQUInt8),
      at::quantize_per_channel(torch::rand({2, 3}), torch::ones({2}), torch::zeros({2}), 0, at::kQUInt4x2)};
}

TEST(HostileTensors, DamagedMetadataGivesTensorsInsideTheirMemoryOrAnError) {
  int refused = 0;
  const std::vector<at::Tensor> tensors = varied_tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    const PackedTensors packed = pack(std::span(&tensors[i], 1));
    refused += damage(packed.metadata, i, 1500, [&](const Bytes& metadata) {
      std::vector<Buffer> buffers = deliver(packed.segments);
      for (const at::Tensor& tensor : unpack(metadata, buffers)) expect_inside_storage(tensor);
    });
  }
  EXPECT_GT(refused, 5000);
}

TEST(HostileTensors, DamagedSegmentsGiveTensorsInsideTheirMemoryOrAnError) {
  const std::vector<at::Tensor> tensors = varied_tensors();
  const PackedTensors packed = pack(tensors);
  std::mt19937_64 random(7);
  SCOPED_TRACE("seed 7");
  int refused = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<Buffer> buffers = deliver(packed.segments);
    Buffer& target = buffers[random() % buffers.size()];
    target.data[random() % target.size] = static_cast<std::byte>(random());
    try {
      for (const at::Tensor& tensor : unpack(packed.metadata, buffers)) expect_inside_storage(tensor);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      ++refused;
    }
  }
  EXPECT_GT(refused, 50);  // indices out of range, or not ascending in a coalesced tensor
}

class HostileSegments : public ::testing::Test {
 protected:
  ErrorKind unpack_kind() {
    return kind_of([&] { unpack(packed_.metadata, buffers_); });
  }
  std::vector<at::Tensor> tensors_{torch::arange(4), torch::ones({2}, at::kComplexDouble)};
  PackedTensors packed_ = pack(tensors_);
  std::vector<Buffer> buffers_ = deliver(packed_.segments);
};

TEST_F(HostileSegments, OfAnotherNumberAreRefused) {
  buffers_.push_back(allocate_buffer(8));
  EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
  buffers_ = deliver(packed_.segments);
  buffers_.pop_back();
  EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
  packed_.metadata.clear();
  EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
}

TEST_F(HostileSegments, OfAnotherSizeAreRefused) {
  for (const std::size_t size : {31u, 33u}) {
    buffers_ = deliver(packed_.segments);
    buffers_[0] = allocate_buffer(size);
    EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
  }
}

TEST_F(HostileSegments, ThatAreMisalignedOrHaveNoOwnerAreRejected) {
  const Buffer wide = allocate_buffer(64);
  buffers_[1] = {wide.data + 8, 32, wide.owner};
  EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
  buffers_ = deliver(packed_.segments);
  buffers_[0].owner = nullptr;
  EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
}

TEST_F(HostileSegments, UsedTwiceAreRefused) {
  EXPECT_EQ(unpack(packed_.metadata, buffers_).size(), 2u);
  EXPECT_EQ(unpack_kind(), ErrorKind::kInvalid);
}

TEST(HostileTensors, SparseIndicesMustLieInsideTheSizesAndAscendWhereTheyAreCalledCoalesced) {
  const at::Tensor indices = torch::tensor({{0, 2}}, at::kLong);
  const at::Tensor sent = at::sparse_coo_tensor(indices, torch::ones({2}), {3}).coalesce();
  const PackedTensors packed = pack(std::span(&sent, 1));
  const auto unpack_with = [&](std::int64_t first, std::int64_t second) {
    std::vector<Buffer> buffers = deliver(packed.segments);
    std::memcpy(buffers[0].data, &first, sizeof first);
    std::memcpy(buffers[0].data + sizeof first, &second, sizeof second);
    return unpack(packed.metadata, buffers);
  };
  EXPECT_EQ(unpack_with(1, 2).size(), 1u);
  for (const auto& pair : std::vector<std::pair<int, int>>{{2, 1}, {1, 1}, {0, 3}, {-1, 0}}) {
    EXPECT_EQ(kind_of([&] { unpack_with(pair.first, pair.second); }), ErrorKind::kInvalid)
        << pair.first << ' ' << pair.second;
  }
}

TEST(HostileTensors, AQuantizersChannelsMustFitItsTensor) {
  const at::Tensor sent = at::quantize_per_channel(torch::randn({4, 2}), torch::ones({4}, at::kDouble),
                                                   torch::zeros({4}, at::kLong), 0, at::kQInt8);
  const PackedTensors packed = pack(std::span(&sent, 1));
  constexpr std::size_t kAxis = 7, kScalesDtype = 15;  // after count, kind, flags and scheme; after the axis
  const auto unpack_with = [&](std::int64_t axis, std::uint8_t scales_dtype) {
    ByteWriter metadata(packed.metadata);
    metadata.patch(kAxis, axis);
    metadata.patch(kScalesDtype, scales_dtype);
    std::vector<Buffer> buffers = deliver(packed.segments);
    return unpack(metadata.bytes(), buffers);
  };
  EXPECT_EQ(unpack_with(0, 7).size(), 1u);
  for (const std::int64_t axis :
       {std::int64_t{1}, std::int64_t{2}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    EXPECT_EQ(kind_of([&] { unpack_with(axis, 7); }), ErrorKind::kInvalid) << axis;
  }
  EXPECT_EQ(kind_of([&] { unpack_with(0, 4); }), ErrorKind::kInvalid);
}

/// A table of one strided tensor, written by hand.
Bytes metadata_of(std::uint8_t dtype, std::vector<std::int64_t> sizes,
                  std::vector<std::int64_t> strides = {}) {
  ByteWriter writer;
  writer.put(std::uint32_t{1});
  for (const std::uint8_t byte : {std::uint8_t{1}, std::uint8_t{0}, dtype}) writer.put(byte);
  writer.put(static_cast<std::uint8_t>(strides.empty() ? 0 : 1));
  writer.put(static_cast<std::uint8_t>(sizes.size()));
  for (const std::int64_t value : sizes) writer.put(value);
  for (const std::int64_t value : strides) writer.put(value);
  return writer.take();
}

void expect_refused(const Bytes& metadata, std::size_t segment_size, ErrorKind kind = ErrorKind::kInvalid) {
  std::vector<Buffer> buffers;
  if (segment_size > 0) buffers.push_back(allocate_buffer(segment_size));
  EXPECT_EQ(kind_of([&] { unpack(metadata, buffers); }), kind);
}

TEST(HostileTensors, TheHandWrittenTableIsValid) {
  std::vector<Buffer> buffers{allocate_buffer(24)};
  EXPECT_EQ(unpack(metadata_of(6, {2, 3}, {1, 2}), buffers)[0].strides(), at::IntArrayRef({1, 2}));
}

TEST(HostileTensors, SizesThatOverflowAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  expect_refused(metadata_of(6, {kHuge, 4}), 0);
  expect_refused(metadata_of(6, {std::int64_t{1} << 32, std::int64_t{1} << 32}), 0);
  expect_refused(metadata_of(7, {kHuge}), 8);
  expect_refused(metadata_of(7, {kHuge, 0, kHuge}), 0);
  expect_refused(metadata_of(7, {kHuge, 8}, {0, 1}), 64);
  expect_refused(metadata_of(6, {-1}), 4);
  expect_refused(metadata_of(6, {-1, -1}), 4);
}

TEST(HostileTensors, StridesThatLeaveTheMemoryAreRefused) {
  expect_refused(metadata_of(6, {2, 3}, {4, 1}), 24);                      // a gap
  expect_refused(metadata_of(6, {2, 3}, {1, 1}), 24);                      // an overlap
  expect_refused(metadata_of(6, {2, 3}, {-3, 1}), 24);                     // backwards
  expect_refused(metadata_of(6, {1, 3}, {std::int64_t{1} << 60, 1}), 12);  // longer than any address space
}

TEST(HostileTensors, DtypesLayoutsAndDimensionsMustExist) {
  expect_refused(metadata_of(99, {2}), 8);
  expect_refused(metadata_of(255, {2}), 8);
  expect_refused(metadata_of(12, {2}), 2);  // quantized without a quantizer
  expect_refused(metadata_of(6, std::vector<std::int64_t>(65, 1)), 4);
  Bytes metadata = metadata_of(6, {2});
  metadata[7] = std::byte{2};
  expect_refused(metadata, 8);
  metadata = metadata_of(4, {2});
  metadata[5] = std::byte{1};  // integers cannot require grad
  expect_refused(metadata, 16);
  metadata = metadata_of(6, {2});
  metadata[5] = std::byte{8};  // placed on a device that is not named
  expect_refused(metadata, 8);
  if (TORCH_VERSION_MAJOR < 2) expect_refused(metadata_of(24, {2}), 2, ErrorKind::kUnsupported);
}

}  // namespace
}  // namespace torchspan::wire::tensors_hostile_test
