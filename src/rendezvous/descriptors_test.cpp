#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "tests/support/errors.h"

namespace torchspan::rendezvous::descriptors_test {
namespace {

using ::testing::HasSubstr;

TEST(Descriptors, RankZeroFailsAtOnceIfItsLimitAllowsNoConnectionToEveryWorker) {
  const auto executor = make_executor();
  Runtime runtime(*executor, "worker0", LogLevel::kOff);
  MembershipOptions options;
  options.name = "worker0";
  options.world_size = 500;
  options.store_address = "unix:/nowhere/store";
  options.timeout = std::chrono::seconds(60);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = 400;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  const Error error = testing::error_of(
      [&] { Membership::join(runtime, stream_transports(*executor, net::Secret::random()), options); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
  EXPECT_THAT(error.what(), HasSubstr("rank 0 serves 500 workers and needs at least 532 file descriptors"));
  EXPECT_THAT(error.what(), HasSubstr("its limit is 400"));
  EXPECT_THAT(error.what(), HasSubstr("ulimit -n 1064"));
}

}  // namespace
}  // namespace torchspan::rendezvous::descriptors_test
