#include "rendezvous/api/process_stat.h"

#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

namespace torchspan::rendezvous::process_stat_test {
namespace {

TEST(ProcessStat, ReadsStateAndStartBehindAnyCommandName) {
  for (const std::string name : {"train", "a b", ") R (", "T 1 2)"}) {
    const auto stat = parse_process_stat("4711 (" + name +
                                         ") T 1 4711 4711 34816 4711 4194304 1 0 0 0 1 2 0 0 20 0 1 0 "
                                         "987654321 1000 10\n");
    ASSERT_TRUE(stat) << name;
    EXPECT_TRUE(stat->stopped());
    EXPECT_EQ(stat->start_ticks, 987654321u);
  }
}

TEST(ProcessStat, IsEmptyForInvalidText) {
  for (const char* text : {"", "4711", "4711 (x)", "4711 (x) R 1 2 3",
                           "4711 (x) R 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 soon 3"}) {
    EXPECT_FALSE(parse_process_stat(text)) << text;
  }
}

TEST(ProcessStat, OfThisProcessRunsAndKeepsItsStart) {
  const auto stat = read_process_stat(getpid());
  ASSERT_TRUE(stat);
  EXPECT_FALSE(stat->stopped());
  EXPECT_GT(stat->start_ticks, 0u);
  EXPECT_EQ(read_process_stat(getpid())->start_ticks, stat->start_ticks);
}

TEST(ProcessStat, IsEmptyForAMissingProcess) { EXPECT_FALSE(read_process_stat(-5)); }

}  // namespace
}  // namespace torchspan::rendezvous::process_stat_test
