#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/metrics.h>

namespace torchspan::metrics_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(Metrics, GivesTheSameCounterForTheSameName) {
  Metrics metrics;
  Counter& sent = metrics.counter("sent");
  EXPECT_EQ(&metrics.counter("sent"), &sent);
  EXPECT_NE(&metrics.counter("received"), &sent);
  sent.add();
  sent.add(10);
  sent.subtract(2);
  EXPECT_EQ(metrics.counter("sent").value(), 9u);
}

TEST(Metrics, ListsEveryCounterByName) {
  Metrics metrics;
  EXPECT_THAT(metrics.snapshot(), IsEmpty());
  metrics.counter("b").add(2);
  metrics.counter("a");
  EXPECT_THAT(metrics.snapshot(), ElementsAre(Pair("a", 0u), Pair("b", 2u)));
}

TEST(Metrics, KeepsCounterAddressesWhileOthersAreAdded) {
  Metrics metrics;
  Counter& first = metrics.counter("first");
  for (int i = 0; i < 1000; ++i) metrics.counter(std::to_string(i));
  first.add(3);
  EXPECT_EQ(metrics.snapshot().at("first"), 3u);
}

TEST(Metrics, CountsEveryAdditionOfSeveralThreads) {
  const auto executor = make_executor();
  Metrics metrics;
  {
    std::vector<Thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.push_back(executor->spawn("counts", [&] {
        for (int n = 0; n < 2000; ++n) metrics.counter("shared").add(2);
        for (int n = 0; n < 2000; ++n) metrics.counter("shared").subtract();
        metrics.snapshot();
      }));
    }
  }
  EXPECT_EQ(metrics.counter("shared").value(), 8000u);
}

}  // namespace
}  // namespace torchspan::metrics_test
