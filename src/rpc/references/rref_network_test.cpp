// Measures what references cost on hundreds of workers of the simulated network, in messages and in memory,
// with the driver, the handles and the acknowledgements that real workers have.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "tests/support/errors.h"
#include "tests/support/reference_nodes.h"

namespace torchspan::rpc::rref_network_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using torchspan::testing::error_of;
using Cost = ReferenceCost;

TEST(RRefScale, CostsTheSameForEveryReferenceOfHundredsOfWorkersOnANetwork) {
  NetworkWorld world(250);
  Cost few, many;
  world.executor().run([&] {
    world.share_and_drop(4 * 250 * kNeighbors);  // every worker has met its neighbors
    few = world.share_and_drop(5'000);
    many = world.share_and_drop(25'000);
  });
  fmt::print(
      "control messages per reference: {:.2f} of 5,000, {:.2f} of 25,000; numbers remembered per worker: "
      "{} and {}; memory grew by {:.1f} bytes per reference\n",
      few.messages, many.messages, few.remembered, many.remembered, (many.bytes - few.bytes) / 25'000);
  // A value shared with three: four deletions, three fork requests, three acceptances.
  EXPECT_DOUBLE_EQ(few.messages, 10.0 / 4.0);
  EXPECT_DOUBLE_EQ(many.messages, 10.0 / 4.0);
  EXPECT_LE(many.remembered, 4u * kNeighbors) << "an interval for each creator and each holder";
  EXPECT_LT((many.bytes - few.bytes) / 25'000, 1.0) << "released references take no memory";
}

struct CountedValue {
  int* alive;
  explicit CountedValue(int& alive) : alive(&alive) { ++alive; }
  CountedValue(CountedValue&& other) noexcept : alive(std::exchange(other.alive, nullptr)) {}
  ~CountedValue() {
    if (alive != nullptr) --*alive;
  }
};

// A member of the world may be wrong or hostile.
TEST(References, RefuseANumberThatIsHereAndKeepTheReferenceThatHasIt) {
  Shared shared;
  shared.executor.run([&] {
    const auto holder = std::make_shared<Node>(shared, 0);
    holder->begin(3);
    const PeerId sender{1, 0};
    const wire::Handle handle{.owner = 2, .value = {2, 7}, .fork = {1, 5}};
    const auto first = holder->references().from_handles({handle}, sender);
    for (wire::Handle again : {handle, wire::Handle{.owner = 1, .value = {1, 8}, .fork = {1, 5}}}) {
      const wire::Handle fresh{.owner = 1, .value = {1, 9}, .fork = {1, 6}};
      const Error error = error_of([&] { holder->references().from_handles({fresh, again}, sender); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.message(),
                  ::testing::HasSubstr("sent the number of a reference that this worker has"));
      shared.jobs->run();
      EXPECT_EQ(holder->references().counts().users, 1u);
    }
    EXPECT_EQ(holder->references().list().at(0).value, "2:7");
  });
}

// The driver releases the value on the pool even if the program also holds it. Otherwise the program might
// release it a moment earlier, and the value's destructor would run on the thread that reads messages.
TEST(References, AreReleasedOnAThreadThatMayWait) {
  Shared shared;
  shared.executor.run([&] {
    const auto owner = std::make_shared<Node>(shared, 0);
    owner->begin(2);
    int alive = 0;
    ReferencePtr held = owner->references().own(make_value<CountedValue>(alive), "CountedValue", {});
    const GlobalId value = held->value_id();
    const auto handles = owner->references().to_handles({held}, {1, 0});
    owner->references().driver().receive(
        {RRefMessage::Kind::kUserDelete, {0, 0}, value, handles.at(0).fork, 0, {}}, {1, 0});
    EXPECT_EQ(owner->references().counts().owners, 0u);
    held = nullptr;
    EXPECT_EQ(alive, 1);
    shared.jobs->run();
    EXPECT_EQ(alive, 0);
  });
}

}  // namespace
}  // namespace torchspan::rpc::rref_network_test
