#include "elastic/training/left_generation.h"

#include <gtest/gtest.h>
#include <stdexcept>

namespace torchspan::elastic::left_generation_test {
namespace {

TEST(LeftGeneration, IsATimeoutIfTheRankGaveUpWaiting) {
  const Error left = left_generation(
      2, 7, std::make_exception_ptr(Error(ErrorKind::kTimedOut, "rank 1 made no vote in 3 s")));
  EXPECT_EQ(left.kind(), ErrorKind::kTimedOut) << "no rank has died";
  EXPECT_EQ(left.message(), "rank 2 left generation 7: timed out: rank 1 made no vote in 3 s");
}

TEST(LeftGeneration, IsADisconnectionElse) {
  const Error dead =
      left_generation(0, 3, std::make_exception_ptr(Error(ErrorKind::kDisconnected, "worker1 died")));
  EXPECT_EQ(dead.kind(), ErrorKind::kDisconnected);
  const Error failed = left_generation(0, 3, std::make_exception_ptr(std::runtime_error("no such file")));
  EXPECT_EQ(failed.kind(), ErrorKind::kDisconnected);
  EXPECT_EQ(failed.message(), "rank 0 left generation 3: no such file");
}

TEST(LeftTraining, IsADisconnectionAlsoIfTheProgramFailedWithATimeout) {
  const Error left = left_training(
      1, 4, std::make_exception_ptr(Error(ErrorKind::kTimedOut, "the database did not answer")));
  EXPECT_EQ(left.kind(), ErrorKind::kDisconnected) << "the rank does not return";
  EXPECT_EQ(left.message(), "rank 1 left generation 4: timed out: the database did not answer");
}

}  // namespace
}  // namespace torchspan::elastic::left_generation_test
