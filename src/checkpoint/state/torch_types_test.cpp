#include "checkpoint/state/torch_types.h"

#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/checkpoint.h>

#include "device/api/torch_version.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::torch_types_test {

using torchspan::testing::TemporaryFolder;

/// The dtypes of the format that LibTorch added after 1.13.
std::vector<at::ScalarType> newer_types() {
  std::vector<at::ScalarType> types;
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 1)
  types.insert(types.end(), {at::ScalarType::Float8_e5m2, at::ScalarType::Float8_e4m3fn});
#endif
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 3)
  types.insert(types.end(), {at::ScalarType::UInt16, at::ScalarType::UInt32, at::ScalarType::UInt64});
#endif
  return types;
}

TEST(TorchTypes, EachHasOneElementTypeOfItsSize) {
  std::vector<at::ScalarType> types{at::kBool, at::kByte,  at::kLong,
                                    at::kHalf, at::kFloat, at::kComplexFloat};
  for (const at::ScalarType type : newer_types()) types.push_back(type);
  for (const at::ScalarType type : types) {
    const auto element = element_type_of(type);
    ASSERT_TRUE(element) << c10::toString(type);
    EXPECT_EQ(scalar_type_of(*element), type);
    EXPECT_EQ(bits_of(*element), 8 * c10::elementSize(type)) << c10::toString(type);
  }
  EXPECT_FALSE(element_type_of(at::kComplexDouble));
  EXPECT_FALSE(element_type_of(at::ScalarType::Undefined));
  EXPECT_FALSE(scalar_type_of(ElementType::kF4)) << "LibTorch stores two of them as one element";
}

TEST(TorchTypes, OfNewerLibTorchsAreSavedAndLoaded) {
  if (newer_types().empty()) GTEST_SKIP() << "this LibTorch has none";
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/x.safetensors";
  const at::Tensor bytes = at::arange(32, at::kByte).view({2, 16});
  NamedTensors tensors;
  for (const at::ScalarType type : newer_types()) tensors[c10::toString(type)] = bytes.view(type);
  save_safetensors(path, tensors);
  const NamedTensors loaded = load_safetensors(path);
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(loaded.at(name).scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(loaded.at(name).view(at::kByte).equal(bytes)) << name;
  }
}

}  // namespace torchspan::checkpoint::torch_types_test
