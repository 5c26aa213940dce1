#include <gtest/gtest.h>

#include "rpc/rref_table.h"

namespace torchspan::rpc {
namespace {

constexpr std::uint32_t kSelf = 0;
constexpr GlobalId kValue{kSelf, 7}, kFork{kSelf, 8};

// remote() to oneself and the first use of its RRef are two messages to oneself, which may be served in
// either order: the use must find the reference that the creation will fill.
TEST(RRefTable, FindsAnExpectedValueAfterItsReferenceTravelledAheadOfItsCreation) {
  RRefTable table(kSelf);
  RRefTable::Effects effects;
  const auto owner = std::make_shared<int>(42);
  table.expect_owner(kValue, owner);
  table.add_fork(kValue, kFork, kSelf, owner);
  table.accept_at_owner({kSelf, kValue, kFork, 0}, kSelf, effects);
  EXPECT_EQ(table.find_owner(kValue), owner);
  table.creation_arrived(kValue, effects);
  EXPECT_EQ(table.find_owner(kValue), nullptr);
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, KeepsAnArrivedValueForAsLongAsItHasForks) {
  RRefTable table(kSelf);
  RRefTable::Effects effects;
  const auto owner = std::make_shared<int>(42);
  table.expect_owner(kValue, owner);
  table.add_fork(kValue, kFork, kSelf, owner);
  table.creation_arrived(kValue, effects);
  EXPECT_EQ(table.find_owner(kValue), owner);
  table.on_user_delete(kValue, kFork, effects);
  EXPECT_EQ(table.find_owner(kValue), nullptr);
}

}  // namespace
}  // namespace torchspan::rpc
