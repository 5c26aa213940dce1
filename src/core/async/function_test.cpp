#include <gtest/gtest.h>
#include <memory>
#include <string>

#include <torchspan/detail/core/function.h>

namespace torchspan::function_test {
namespace {

int triple(int value) { return 3 * value; }

TEST(UniqueFunction, IsEmptyUntilAssigned) {
  UniqueFunction<void()> nothing, null = nullptr;
  EXPECT_FALSE(nothing);
  EXPECT_FALSE(null);
  nothing = [] {};
  EXPECT_TRUE(nothing);
  nothing = nullptr;
  EXPECT_FALSE(nothing);
}

TEST(UniqueFunction, HoldsMoveOnlyCapturesAndTakesThemAlongWhenMoved) {
  UniqueFunction<int()> function = [value = std::make_unique<int>(7)] { return *value; };
  UniqueFunction<int()> moved = std::move(function);
  EXPECT_FALSE(function);  // NOLINT(bugprone-use-after-move): what is tested
  EXPECT_EQ(moved(), 7);
  EXPECT_EQ(moved(), 7);
}

TEST(UniqueFunction, PassesMoveOnlyArgumentsAndResults) {
  UniqueFunction<std::unique_ptr<int>(std::unique_ptr<int>)> next = [](std::unique_ptr<int> value) {
    ++*value;
    return value;
  };
  EXPECT_EQ(*next(std::make_unique<int>(4)), 5);
}

TEST(UniqueFunction, PassesReferencesThrough) {
  UniqueFunction<void(std::string&)> append = [](std::string& text) { text += "!"; };
  std::string text = "hello";
  append(text);
  EXPECT_EQ(text, "hello!");
}

TEST(UniqueFunction, KeepsStateBetweenCalls) {
  UniqueFunction<int()> count = [n = 0]() mutable { return ++n; };
  EXPECT_EQ(count(), 1);
  EXPECT_EQ(count(), 2);
}

TEST(UniqueFunction, AcceptsPlainFunctionsAndDiscardsUnwantedResults) {
  UniqueFunction<int(int)> function = triple;
  EXPECT_EQ(function(5), 15);
  UniqueFunction<void(int)> ignores = triple;
  ignores(5);
}

TEST(UniqueFunction, DestroysWhatItHoldsWhenReplaced) {
  const auto token = std::make_shared<int>(1);
  UniqueFunction<void()> function = [token] {};
  EXPECT_EQ(token.use_count(), 2);
  function = [] {};
  EXPECT_EQ(token.use_count(), 1);
}

TEST(UniqueFunction, PropagatesExceptions) {
  UniqueFunction<void()> throws = [] { throw std::string("out"); };
  EXPECT_THROW(throws(), std::string);
}

}  // namespace
}  // namespace torchspan::function_test
