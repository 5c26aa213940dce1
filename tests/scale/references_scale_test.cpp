// What references cost in large worlds, with the driver, the handles and the acknowledgements of real workers, but
// without their threads.
#include <gtest/gtest.h>

#include "tests/scale/measurements.h"
#include "tests/support/reference_nodes.h"

namespace torchspan::testing::scale::references_scale_test {
namespace {

using rpc::testing::kNeighbors;
using rpc::testing::NetworkWorld;
using rpc::testing::ReferenceCost;

/// Every value is made on another worker, shared with three more, and dropped by all.
TEST(ReferencesScale, AReferenceCostsTheSameInEveryWorld) {
  for (const int workers : world_sizes()) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    NetworkWorld world(static_cast<std::uint32_t>(workers));
    Traffic traffic(world.network());
    const std::size_t references = std::size_t{16} * static_cast<std::size_t>(workers);
    ReferenceCost before, cost;
    Traffic::Counts counts;
    Duration time{};
    world.executor().run([&] {
      before = world.share_and_drop(4 * references);  // every worker has met its neighbors
      traffic.take();
      const TimePoint began = world.executor().now();
      cost = world.share_and_drop(references);
      counts = traffic.take();
      time = world.executor().now() - began;
    });
    const double made = static_cast<double>(references);
    record("references", workers,
           {{"control_messages_per_reference", cost.messages},
            {"messages_per_reference", counts.messages / made},
            {"bytes_per_reference", counts.bytes / made},
            {"numbers_per_worker", static_cast<double>(cost.remembered)},
            {"heap_growth_per_worker", (cost.bytes - before.bytes) / workers},
            {"microseconds", microseconds_of(time)}});
    // A value shared with three: four deletions, three fork requests, three acceptances; each is answered, as are
    // the creation and the three that carry the references.
    EXPECT_DOUBLE_EQ(cost.messages, 10.0 / 4.0);
    EXPECT_DOUBLE_EQ(counts.messages, 2 * (10.0 + 4.0) / 4.0 * made);
    EXPECT_LE(counts.bytes, 900 * made);
    EXPECT_LE(cost.remembered, 4U * kNeighbors) << "an interval for each creator and each holder";
  }
}

}  // namespace
}  // namespace torchspan::testing::scale::references_scale_test
