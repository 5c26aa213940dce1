#include "elastic/training/late_limit.h"

#include <gtest/gtest.h>

namespace torchspan::elastic::late_limit_test {
namespace {

TEST(LateLimit, IsLongerThanAStep) {
  EXPECT_EQ(late_limit(std::chrono::seconds(3)), std::chrono::seconds(4));
  EXPECT_EQ(late_limit(Duration::max()), Duration::max());
  EXPECT_EQ(late_limit(Duration::max() - Duration(1)), Duration::max());
}

}  // namespace
}  // namespace torchspan::elastic::late_limit_test
