#include "collective/kernels.h"

#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torchspan::collective::kernels_test {
namespace {

/// Reduces rows of equal length into the first of them.
template <class T>
std::vector<T> reduce_rows(at::ScalarType dtype, ReduceOp reduction, std::vector<std::vector<T>> rows) {
  std::vector<const std::byte*> sources;
  for (const auto& row : rows) sources.push_back(reinterpret_cast<const std::byte*>(row.data()));
  auto* target = reinterpret_cast<std::byte*>(rows[0].data());
  find_kernel(dtype, reduction)({sources, {&target, 1}, rows[0].size(), rows.size()});
  return rows[0];
}

TEST(Kernels, AddInTheOrderOfTheRanks) {
  // In any other order the small numbers would not be lost.
  const std::vector<double> sum = reduce_rows<double>(at::kDouble, kSum, {{1e16}, {1.0}, {1.0}, {-1e16}});
  EXPECT_EQ(sum[0], ((1e16 + 1.0) + 1.0) - 1e16);
  EXPECT_EQ(sum[0], 0.0);
}

TEST(Kernels, RoundHalvesOnceAtTheEnd) {
  // 2048 + 1 is not representable in half: added one by one in half, the ones would be lost.
  const auto half = [](float value) { return std::vector<c10::Half>(9, static_cast<c10::Half>(value)); };
  const auto sums = reduce_rows<c10::Half>(at::kHalf, kSum, {half(2048), half(1), half(1), half(1), half(1)});
  for (const c10::Half value : sums) EXPECT_EQ(static_cast<float>(value), 2052.0F);
  const auto bfloat = [](float value) {
    return std::vector<c10::BFloat16>(5, static_cast<c10::BFloat16>(value));
  };
  const auto more = reduce_rows<c10::BFloat16>(at::kBFloat16, kSum, {bfloat(256), bfloat(1), bfloat(1)});
  for (const c10::BFloat16 value : more) EXPECT_EQ(static_cast<float>(value), 258.0F);
}

TEST(Kernels, RoundToEvenAsLibTorchDoes) {
  for (std::uint32_t bits = 0; bits < 0xFFFF'0000U; bits += 0x3FF1) {
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    const auto ours = reduce_rows<c10::BFloat16>(at::kBFloat16, kAvg, {{static_cast<c10::BFloat16>(value)}});
    const auto theirs = static_cast<c10::BFloat16>(value);
    if (value != value) {
      EXPECT_NE(static_cast<float>(ours[0]), static_cast<float>(ours[0])) << bits;
    } else {
      EXPECT_EQ(ours[0].x, theirs.x) << bits;
    }
  }
}

TEST(Kernels, WrapIntegersAndCombineBooleans) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduce_rows<std::int64_t>(at::kLong, kSum, {{kMost}, {1}})[0],
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(reduce_rows<std::uint8_t>(at::kByte, kSum, {{200}, {100}})[0], 44);
  const auto any = reduce_rows<std::uint8_t>(at::kBool, kSum, {{0, 1, 1}, {0, 0, 1}});
  EXPECT_EQ(any, (std::vector<std::uint8_t>{0, 1, 1}));
  const auto all = reduce_rows<std::uint8_t>(at::kBool, kProduct, {{0, 1, 1}, {0, 0, 1}});
  EXPECT_EQ(all, (std::vector<std::uint8_t>{0, 0, 1}));
}

TEST(Kernels, PropagateNansInMinimaAndMaxima) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp reduction : {kMin, kMax}) {
    const auto result = reduce_rows<float>(at::kFloat, reduction, {{nan, 1, 2}, {1, nan, 3}});
    EXPECT_NE(result[0], result[0]);
    EXPECT_NE(result[1], result[1]);
    EXPECT_EQ(result[2], reduction == kMin ? 2 : 3);
  }
}

TEST(Kernels, RejectUnsupportedReductions) {
  for (const auto& [dtype, reduction] : std::vector<std::pair<at::ScalarType, ReduceOp>>{
           {at::kInt, kAvg}, {at::kBool, kAvg}, {at::kComplexFloat, kMax}, {at::kQInt8, kSum}}) {
    try {
      find_kernel(dtype, reduction);
      ADD_FAILURE() << "a kernel was found";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(to_string(reduction)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace torchspan::collective::kernels_test
