#include "launch/display/lines.h"

#include <gtest/gtest.h>
#include <random>

namespace torchspan::launch::lines_test {
namespace {

/// Returns the lines of `text` when it arrives in pieces cut by `random`.
std::vector<std::string> split(const std::string& text, std::mt19937_64& random,
                               std::size_t longest = 1 << 20) {
  std::vector<std::string> lines;
  const auto take = [&](std::string_view line) { lines.emplace_back(line); };
  LineSplitter splitter(longest);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t size = 1 + random() % 5;
    splitter.feed(std::string_view(text).substr(at, size), take);
    at += size;
  }
  splitter.finish(take);
  return lines;
}

using Lines = std::vector<std::string>;

TEST(LineSplitter, CutsAtNewlinesHoweverTheBytesArrive) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::string text;
    Lines expected;
    for (int i = 0; i < 50; ++i) {
      expected.emplace_back(random() % 12, static_cast<char>('a' + random() % 26));
      text += expected.back() + (random() % 4 == 0 ? "\r\n" : "\n");
    }
    EXPECT_EQ(split(text, random), expected);
  }
}

TEST(LineSplitter, HandsOutTheRestAtTheEnd) {
  std::mt19937_64 random(1);
  EXPECT_EQ(split("a\nbc", random), (Lines{"a", "bc"}));
  EXPECT_EQ(split("a\n\n", random), (Lines{"a", ""}));
  EXPECT_EQ(split("", random), Lines{});
}

TEST(LineSplitter, RestartsTheLineAtACarriageReturn) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(split("10%\r50%\r100%\nnext\r\n", random), (Lines{"100%", "next"}));
    EXPECT_EQ(split("10%\r50%\r", random), (Lines{"50%"}));
  }
}

TEST(LineSplitter, HandsOutEndlessLinesInPieces) {
  std::mt19937_64 random(3);
  EXPECT_EQ(split("abcdefgh\nij\n", random, 4), (Lines{"abcd", "efgh", "", "ij"}));
}

TEST(Names, AreShownWithoutControlCharacters) {
  EXPECT_EQ(without_controls("a\x1b[2J\nb\r\x7f\xc3\xa4\xff"), "a [2J b  \xc3\xa4\xff");
  EXPECT_EQ(without_controls("a\xc2\x9b"
                             "2J\xc2\x80"
                             "b"),
            "a 2J b")
      << "CSI and the first of C1";
  EXPECT_EQ(without_controls("\xc2\xa0\xe2\x80\x9b\xc2"), "\xc2\xa0\xe2\x80\x9b\xc2")
      << "other characters stay";
}

TEST(LastLines, KeepTheLastNonEmptyLines) {
  LastLines words(3);
  EXPECT_EQ(words.lines(), Lines{});
  for (const char* line : {"a", "b", "", "c", "d"}) words.add(line);
  EXPECT_EQ(words.lines(), (Lines{"b", "c", "d"}));
  words.add(std::string(10000, 'x'));
  EXPECT_EQ(words.lines().back().size(), 500u);
}

}  // namespace
}  // namespace torchspan::launch::lines_test
