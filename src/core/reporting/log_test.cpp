#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/core/log.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::log_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

struct Lines {
  std::vector<std::pair<LogLevel, std::string>> lines;
  Log::Sink sink() {
    return [this](LogLevel level, const std::string& line) { lines.emplace_back(level, line); };
  }
};

TEST(Log, WritesLinesOfItsLevelAndAboveWithTheOwnersName) {
  Lines out;
  Log log("worker1", LogLevel::kInfo, out.sink());
  log.debug("a");
  log.info("b");
  log.warning("c");
  log.error("d");
  EXPECT_THAT(out.lines, ElementsAre(Pair(LogLevel::kInfo, "torchspan[worker1] info: b\n"),
                                     Pair(LogLevel::kWarning, "torchspan[worker1] warning: c\n"),
                                     Pair(LogLevel::kError, "torchspan[worker1] error: d\n")));
}

TEST(Log, ChangesItsLevelAndCanBeSilent) {
  Lines out;
  Log log("w", LogLevel::kWarning, out.sink());
  EXPECT_FALSE(log.enabled(LogLevel::kDebug));
  log.set_level(LogLevel::kDebug);
  EXPECT_TRUE(log.enabled(LogLevel::kDebug));
  log.set_level(LogLevel::kOff);
  log.error("nobody reads this");
  log.write(LogLevel::kOff, "nor this");
  EXPECT_THAT(out.lines, IsEmpty());
}

TEST(Log, WritesToStandardErrorWithoutASink) {
  Log log("w7");
  ::testing::internal::CaptureStderr();
  log.warning(std::string(100'000, 'x'));
  log.info("not shown");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "torchspan[w7] warning: " + std::string(100'000, 'x') + "\n");
}

TEST(Log, KeepsLinesWholeWhenSeveralThreadsWrite) {
  const auto executor = make_executor();
  Log log("w");
  ::testing::internal::CaptureStderr();
  {
    std::vector<Thread> threads;
    for (char letter = 'a'; letter < 'e'; ++letter) {
      threads.push_back(executor->spawn("logs", [&log, letter] {
        for (int i = 0; i < 50; ++i) log.error(std::string(60, letter));
      }));
    }
  }
  const std::string all = ::testing::internal::GetCapturedStderr();
  std::size_t lines = 0;
  for (std::size_t at = 0; at < all.size(); ++lines) {
    const std::size_t end = all.find('\n', at);
    ASSERT_NE(end, std::string::npos);
    const std::string line = all.substr(at, end - at);
    ASSERT_EQ(line, "torchspan[w] error: " + std::string(60, line.back()));
    at = end + 1;
  }
  EXPECT_EQ(lines, 200u);
}

TEST(LogLevel, IsParsedByNameAndAnUnknownNameListsTheNames) {
  EXPECT_EQ(parse_log_level("debug"), LogLevel::kDebug);
  EXPECT_EQ(parse_log_level("info"), LogLevel::kInfo);
  EXPECT_EQ(parse_log_level("warning"), LogLevel::kWarning);
  EXPECT_EQ(parse_log_level("error"), LogLevel::kError);
  EXPECT_EQ(parse_log_level("off"), LogLevel::kOff);
  for (const char* text : {"", "Warning", "warn", "debug "}) {
    try {
      parse_log_level(text);
      ADD_FAILURE() << "'" << text << "' was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), HasSubstr("debug, info, warning, error or off"));
    }
  }
}

}  // namespace
}  // namespace torchspan::log_test
