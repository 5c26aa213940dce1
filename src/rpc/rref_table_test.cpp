#include "rpc/rref_table.h"

#include <functional>
#include <gtest/gtest.h>
#include <random>

namespace torchspan::rpc {
namespace {

constexpr std::uint32_t kOwner = 0;
constexpr GlobalId kValue{kOwner, 1000};

/// A world of tables without workers: what is on its way lies in a bag and is taken out in random order,
/// control messages sometimes twice. The program on every worker copies references to others and drops its
/// own at random.
class World {
 public:
  World(std::size_t workers, std::uint64_t seed) : random_(seed) {
    for (std::uint32_t rank = 0; rank < workers; ++rank) tables_.emplace_back(rank);
    owned_ = std::make_shared<int>(42);
    watch_ = owned_;
  }

  void step() {
    const std::size_t choice = random_() % 4;
    if (choice == 0) return send_from_owner();
    if (choice == 1) return send_from_user();
    if (choice == 2) return drop_a_user();
    deliver_one();
  }

  /// The owner's program lets go of its own reference.
  void drop_owner() { owned_.reset(); }
  bool value_lives() const { return !watch_.expired(); }
  bool somebody_refers() const { return owned_ != nullptr || !users_.empty() || handles_on_the_way_ > 0; }
  bool quiet() const { return bag_.empty(); }
  bool has_users() const { return !users_.empty(); }
  void deliver_one() {
    if (bag_.empty()) return;
    const std::size_t pick = random_() % bag_.size();
    auto event = std::move(bag_[pick]);
    bag_.erase(bag_.begin() + static_cast<std::ptrdiff_t>(pick));
    event();
  }
  void drop_a_user() {
    if (users_.empty()) return;
    auto it = users_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(random_() % users_.size()));
    users_.erase(it);
  }
  void expect_empty() const {
    for (const RRefTable& table : tables_) {
      const auto counts = table.counts();
      EXPECT_EQ(counts.owners, 0u);
      EXPECT_EQ(counts.forks, 0u);
      EXPECT_EQ(counts.pending_users, 0u);
      EXPECT_EQ(counts.pending_children, 0u);
    }
  }

 private:
  /// A user reference; its end tells the owner, as UserReference's destructor does.
  struct User {
    World& world;
    std::uint32_t rank;
    GlobalId fork;
    ~User() { world.control(rank, {RRefMessage::Kind::kUserDelete, kOwner, kValue, fork}); }
  };

  void send_from_owner() {
    auto owner = owned_ ? std::static_pointer_cast<void>(owned_) : tables_[kOwner].find_owner(kValue);
    if (!owner) return;
    const auto to = static_cast<std::uint32_t>(1 + random_() % (tables_.size() - 1));
    const GlobalId fork = tables_[kOwner].next_id();
    tables_[kOwner].add_fork(kValue, fork, to, owner);
    carry({kOwner, kValue, fork, 0}, kOwner, to);
  }

  void send_from_user() {
    if (users_.empty()) return;
    auto it = users_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(random_() % users_.size()));
    const std::shared_ptr<User> user = *it;
    const auto to = static_cast<std::uint32_t>(random_() % tables_.size());
    if (to == user->rank) return;
    carry({kOwner, kValue, tables_[user->rank].send_child(user, to), 0}, user->rank, to);
  }

  void carry(wire::Handle handle, std::uint32_t from, std::uint32_t to) {
    ++handles_on_the_way_;
    bag_.push_back([this, handle, from, to] {
      RRefTable::Effects effects;
      if (to == kOwner) {
        EXPECT_NE(tables_[kOwner].find_owner(kValue), nullptr)
            << "a reference came home to a value that is gone";
        tables_[kOwner].accept_at_owner(handle, from, effects);
      } else {
        std::shared_ptr<User> user(new User{*this, to, handle.fork});
        users_.push_back(user);
        if (from != kOwner) tables_[to].adopt_child(handle, from, user, effects);
      }
      --handles_on_the_way_;
      apply(to, std::move(effects));
    });
  }

  void apply(std::uint32_t rank, RRefTable::Effects effects) {
    for (const RRefMessage& message : effects.messages) control(rank, message);
  }

  void control(std::uint32_t from, RRefMessage message) {
    const int copies = random_() % 4 == 0 && message.kind != RRefMessage::Kind::kForkRequest ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      bag_.push_back([this, from, message] { receive(from, message); });
    }
  }

  void receive(std::uint32_t from, const RRefMessage& message) {
    RRefTable& table = tables_[message.to];
    RRefTable::Effects effects;
    switch (message.kind) {
      case RRefMessage::Kind::kForkRequest:
        table.on_fork_request(message.value, message.fork, from);
        bag_.push_back([this, from, fork = message.fork] {
          RRefTable::Effects confirmed;
          tables_[from].confirm_user(fork, confirmed);
          apply(from, std::move(confirmed));
        });
        break;
      case RRefMessage::Kind::kChildAccept:
        table.on_child_accept(message.fork, effects);
        break;
      case RRefMessage::Kind::kUserDelete:
        table.on_user_delete(message.value, message.fork, effects);
        break;
    }
    apply(message.to, std::move(effects));
  }

  std::mt19937_64 random_;
  std::vector<std::function<void()>> bag_;
  std::vector<RRefTable> tables_;
  std::shared_ptr<int> owned_;
  std::weak_ptr<int> watch_;
  std::size_t handles_on_the_way_ = 0;
  std::vector<std::shared_ptr<User>> users_;
};

TEST(RRefTable, KeepsAValueExactlyAsLongAsSomebodyRefersToIt) {
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(3 + seed % 4, seed);
    for (int i = 0; i < 60; ++i) {
      if (i == 20) world.drop_owner();
      world.step();
      if (world.somebody_refers()) {
        ASSERT_TRUE(world.value_lives()) << "after step " << i;
      }
    }
    while (!world.quiet() || world.has_users()) {
      world.drop_a_user();
      world.deliver_one();
    }
    EXPECT_FALSE(world.value_lives()) << "the value outlived its last reference";
    world.expect_empty();
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(RRefTable, RemembersAForkThatWasDeletedBeforeItsCreationArrived) {
  RRefTable table(0);
  RRefTable::Effects effects;
  const GlobalId value{1, 5}, fork{1, 6};
  table.on_user_delete(value, fork, effects);
  table.add_fork(value, fork, 1, std::make_shared<int>(1));
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, ReclaimsTheForksOfAWorkerThatDied) {
  RRefTable table(0);
  auto owner = std::make_shared<int>(1);
  table.add_fork(kValue, {1, 1}, 1, owner);
  table.add_fork(kValue, {2, 1}, 2, owner);
  RRefTable::Effects effects;
  table.on_departure(1, effects);
  EXPECT_TRUE(effects.released.empty());
  EXPECT_EQ(table.counts().forks, 1u);
  table.on_departure(2, effects);
  EXPECT_EQ(effects.released.size(), 1u);
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, TakesBackAChildWhoseMessageCouldNotBeSent) {
  RRefTable table(2);
  auto parent = std::make_shared<int>(1);
  const GlobalId child = table.send_child(parent, 1);
  EXPECT_EQ(table.counts().pending_children, 1u);
  EXPECT_EQ(parent.use_count(), 2);
  RRefTable::Effects effects;
  table.undo_child(child, effects);
  effects.released.clear();
  EXPECT_EQ(parent.use_count(), 1);
}

}  // namespace
}  // namespace torchspan::rpc
