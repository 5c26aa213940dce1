#include "elastic/transfer/state_listing.h"

#include <gtest/gtest.h>
#include <random>

namespace torchspan::elastic::state_listing_test {
namespace {

StateListing example() {
  StateListing listing{.position = {7, 2, 30}, .tensors = {}, .values = {}};
  listing.tensors.push_back({"module.weight", at::kDouble, {3, 4}});
  listing.tensors.push_back({"optimizer.lr", at::kFloat, {}});
  listing.values = {{"a", true}, {"b", std::int64_t{-5}}, {"c", 0.25}, {"d", std::string("text")}};
  return listing;
}

TEST(StateListing, ArrivesAsItWasSent) { EXPECT_EQ(StateListing::decode(example().encode()), example()); }

TEST(StateListing, RejectsEveryTruncationAndSurvivesEveryDamage) {
  const Bytes bytes = example().encode();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(StateListing::decode(BytesView(bytes).first(size)), Error) << size;
  std::mt19937_64 random(1);
  for (int i = 0; i < 5000; ++i) {
    Bytes damaged = bytes;
    damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    try {
      for (const auto& entry : StateListing::decode(damaged).tensors) {
        for (const std::int64_t size : entry.shape) ASSERT_GE(size, 0);
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kInvalid);
    }
  }
}

}  // namespace
}  // namespace torchspan::elastic::state_listing_test
