#include <gtest/gtest.h>
#include <vector>

#include "data_parallel/passes.h"

namespace torchspan::data_parallel::static_graph_test {
namespace {

using Slots = std::vector<std::size_t>;

TEST(StaticGraph, ReturnsSlotsInTheOrderOfTheirLastGradientsAndUnusedOnesFirst) {
  StaticGraph graph(4);
  graph.begin_recording();
  for (const std::size_t slot : {3, 1, 3, 0, 1}) graph.record(slot);
  EXPECT_FALSE(graph.is_known());
  EXPECT_EQ(graph.end_recording(), (Slots{2, 3, 0, 1}));
  EXPECT_TRUE(graph.is_known());
  EXPECT_FALSE(graph.was_used(2));
  EXPECT_TRUE(graph.was_used(3));
}

TEST(StaticGraph, RecordsOnlyTheLastPassThatBegan) {
  StaticGraph graph(2);
  graph.begin_recording();
  graph.record(0);
  graph.begin_recording();
  graph.record(1);
  static_cast<void>(graph.end_recording());
  EXPECT_EQ(graph.begin_pass(), (Slots{0}));
}

TEST(StaticGraph, ExpectsAsManyGradientsInEveryPassAsItHasRecorded) {
  StaticGraph graph(2);
  graph.begin_recording();
  for (const std::size_t slot : {0, 1, 0}) graph.record(slot);
  static_cast<void>(graph.end_recording());
  for (int pass = 0; pass < 2; ++pass) {
    EXPECT_TRUE(graph.begin_pass().empty());
    EXPECT_EQ(graph.arrive(0), StaticGraph::Arrival::kMoreFollow);
    EXPECT_EQ(graph.arrive(0), StaticGraph::Arrival::kLast);
    EXPECT_EQ(graph.arrive(1), StaticGraph::Arrival::kLast);
    EXPECT_EQ(graph.arrive(0), StaticGraph::Arrival::kTooMany);
  }
}

}  // namespace
}  // namespace torchspan::data_parallel::static_graph_test
