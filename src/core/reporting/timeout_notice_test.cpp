#include "core/api/timeout_notice.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <vector>

namespace torchspan::timeout_notice_test {
namespace {

using ::testing::HasSubstr;

TEST(TimeoutNotice, SurvivesTheLineThatCarriesIt) {
  const TimeoutNotice sent{.kind = "call",
                           .name = "a \"name\"\n of two lines",
                           .peer = "worker1",
                           .site = "train.cpp:41",
                           .detail = "activations of micro-batch 3",
                           .seconds = 5.25,
                           .id = 1ull << 60,
                           .part = 7};
  const std::string line = encode_timeout(sent);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto got = decode_timeout(line);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->kind, sent.kind);
  EXPECT_EQ(got->name, sent.name);
  EXPECT_EQ(got->peer, sent.peer);
  EXPECT_EQ(got->site, sent.site);
  EXPECT_EQ(got->detail, sent.detail);
  EXPECT_EQ(got->seconds, sent.seconds);
  EXPECT_EQ(got->id, sent.id);
  EXPECT_EQ(got->part, sent.part);
}

TEST(TimeoutNotice, FitsIntoOneWriteToAPipe) {
  const std::string hostile(10'000, '\x01');
  const std::string line =
      encode_timeout({.kind = hostile, .name = hostile, .peer = hostile, .site = hostile, .detail = hostile});
  EXPECT_LE(line.size(), static_cast<std::size_t>(PIPE_BUF));
  EXPECT_TRUE(decode_timeout(line));
  EXPECT_TRUE(decode_timeout(encode_timeout({.name = "\xff\xc3 not UTF-8"})));
}

TEST(TimeoutNotice, IsNoOtherLine) {
  for (const char* line :
       {"", "torchspan-progress 1 step=3", "torchspan-timeout 1 ", "torchspan-timeout 1 []",
        "torchspan-timeout 2 {}", "torchspan-timeout 1 {\"kind\":"}) {
    EXPECT_FALSE(decode_timeout(line)) << line;
  }
  const auto wrong_types =
      decode_timeout(R"(torchspan-timeout 1 {"kind":3,"seconds":"x","id":[],"part":null})");
  ASSERT_TRUE(wrong_types);
  EXPECT_EQ(wrong_types->part, -1);
}

/// Reports through the pipe that the variable names, and returns what arrived.
std::string reported(const TimeoutNotice& notice) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return "no pipe";
  setenv("TORCHSPAN_PROGRESS_FD", std::to_string(ends[1]).c_str(), 1);
  report_timeout(notice);
  unsetenv("TORCHSPAN_PROGRESS_FD");
  close(ends[1]);
  std::array<char, 8192> text{};
  const auto size = read(ends[0], text.data(), text.size());
  close(ends[0]);
  return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0))};
}

TEST(TimeoutNotice, GoesToTheLauncherIfTheOperationLastedASecond) {
  EXPECT_THAT(reported({.kind = "call", .name = "f", .seconds = 2}), HasSubstr("\"name\":\"f\""));
  EXPECT_EQ(reported({.kind = "call", .name = "f", .seconds = 0.9}), "");
}

TEST(TimeoutNotice, IsNotWrittenToAnotherFile) {
  std::string path = (std::filesystem::temp_directory_path() / "torchspan-noticeXXXXXX").string();
  const int file = mkstemp(path.data());
  ASSERT_GT(file, 2);
  setenv("TORCHSPAN_PROGRESS_FD", std::to_string(file).c_str(), 1);
  report_timeout({.kind = "call", .seconds = 9});
  for (const char* wrong : {"", "x", "1", "99999", "-4"}) {
    setenv("TORCHSPAN_PROGRESS_FD", wrong, 1);
    report_timeout({.kind = "call", .seconds = 9});
  }
  unsetenv("TORCHSPAN_PROGRESS_FD");
  EXPECT_EQ(lseek(file, 0, SEEK_END), 0);
  close(file);
  unlink(path.c_str());
}

TEST(WaitWarnings, AreDueAfterTenTwentyAndFortySeconds) {
  WaitWarnings warnings;
  std::vector<int> due;
  for (int second = 1; second <= 50; ++second) {
    if (warnings.due(std::chrono::seconds(second))) due.push_back(second);
  }
  EXPECT_EQ(due, (std::vector<int>{10, 20, 40}));
  EXPECT_EQ(warnings.next(), std::chrono::seconds(80));
}

}  // namespace
}  // namespace torchspan::timeout_notice_test
