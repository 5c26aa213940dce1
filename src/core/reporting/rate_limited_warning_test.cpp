#include "core/api/rate_limited_warning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "core/api/sim_executor.h"

namespace torchspan::seldom_test {
namespace {

using ::testing::EndsWith;

TEST(RateLimitedWarningTest, WritesTheFirstAtOnceAndThenPeriodicSummaries) {
  SimExecutor executor(1);
  std::vector<std::string> lines;
  Log log("worker0", LogLevel::kWarning, [&](LogLevel, const std::string& line) { lines.push_back(line); });
  executor.run([&] {
    RateLimitedWarning warning(log, executor, std::chrono::seconds(10));
    for (int i = 0; i < 5; ++i) warning.write("connection refused");
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_THAT(lines[0], EndsWith("connection refused\n"));
    executor.sleep(std::chrono::seconds(10));
    warning.write("connection refused");
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_THAT(lines[1], EndsWith("connection refused (4 more of this kind since the last)\n"));
    executor.sleep(std::chrono::seconds(10));
    warning.write("connection refused");
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_THAT(lines[2], EndsWith("connection refused\n"));
  });
}

}  // namespace
}  // namespace torchspan::seldom_test
