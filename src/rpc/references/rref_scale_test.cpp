// Measures what the reference protocol costs in a large world: messages per reference, and memory of the
// tables.
#include <algorithm>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <random>

#include "rpc/references/rref_table.h"

namespace torchspan::rpc::rref_scale_test {
namespace {

using Kind = RRefMessage::Kind;

/// Simulates a world of tables whose messages arrive at once, in order. Makes values at random places; each
/// is shared with some workers, user to user, and dropped by all of them.
class LargeWorld {
 public:
  LargeWorld(std::uint32_t workers, std::uint64_t seed) : random_(seed) {
    RRefTable::Effects none;
    for (std::uint32_t rank = 0; rank < workers; ++rank) tables_.push_back(std::make_unique<RRefTable>(rank));
    for (auto& table : tables_) {
      for (std::uint32_t rank = 0; rank < workers; ++rank) table->join({rank, 0}, none);
    }
  }

  /// Makes a value, its creator's reference to it, and `sharers` more references.
  void make(std::size_t sharers) {
    const std::uint32_t creator = draw(), owner = other_than(creator);
    const GlobalId value = tables_[creator]->next_value(owner), fork = tables_[creator]->next_id();
    const auto user = std::make_shared<int>(1);
    tables_[creator]->held().add_creating({owner, 0}, value, fork, user);
    tables_[owner]->owned().creation_arrived(value, fork, std::make_shared<int>(2));
    RRefTable::Effects effects;
    tables_[creator]->held().created(fork, effects);
    deliver(creator, std::move(effects));
    forks_.push_back({creator, fork, user});
    for (std::size_t i = 0; i < sharers; ++i) {
      std::uint32_t to = other_than(owner);
      if (to == creator) to = (owner + 1) % size() == creator ? (owner + 2) % size() : (owner + 1) % size();
      const auto child = tables_[creator]->send_user(user, {to, 0});
      const auto copy = std::make_shared<int>(3);
      tables_[to]->held().adopt({owner, value, *child, 0, 0}, {creator, 0}, copy, effects);
      deliver(to, std::exchange(effects, {}));
      forks_.push_back({to, *child, copy});
    }
    ++values_;
    references_ += 1 + sharers;
  }
  void drop_one() {
    const std::size_t index = random_() % forks_.size();
    const Held held = std::exchange(forks_[index], std::move(forks_.back()));
    forks_.pop_back();
    RRefTable::Effects effects;
    tables_[held.rank]->held().release(held.fork, effects);
    deliver(held.rank, std::move(effects));
  }
  bool empty() const { return forks_.empty(); }
  std::size_t living() const { return forks_.size(); }
  std::uint32_t size() const { return static_cast<std::uint32_t>(tables_.size()); }
  double messages_per_reference() const {
    return static_cast<double>(messages_) / static_cast<double>(references_);
  }
  RRefTable::Counts sum() const {
    RRefTable::Counts sum;
    for (const auto& table : tables_) {
      const auto counts = table->counts();
      sum.owners += counts.owners;
      sum.forks += counts.forks;
      sum.users += counts.users;
      sum.pending_users += counts.pending_users;
      sum.pending_children += counts.pending_children;
      sum.remembered = std::max(sum.remembered, counts.remembered);  // the largest
    }
    return sum;
  }

 private:
  struct Held {
    std::uint32_t rank = 0;
    GlobalId fork;
    std::shared_ptr<int> reference;
  };
  std::uint32_t draw() { return static_cast<std::uint32_t>(random_() % tables_.size()); }
  std::uint32_t other_than(std::uint32_t rank) {
    return static_cast<std::uint32_t>((rank + 1 + random_() % (tables_.size() - 1)) % tables_.size());
  }
  void deliver(std::uint32_t from, RRefTable::Effects effects) {
    for (const RRefMessage& message : effects.messages) {
      ++messages_;
      RRefTable::Effects next;
      const auto refusal = tables_[message.to.rank]->receive(message, {from, 0}, next);
      EXPECT_FALSE(refusal);
      deliver(message.to.rank, std::move(next));
      if (message.kind != Kind::kForkRequest) continue;
      RRefTable::Effects answered;
      tables_[from]->held().fork_answered(message.fork, true, answered);
      deliver(from, std::move(answered));
    }
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<RRefTable>> tables_;
  std::vector<Held> forks_;
  std::size_t messages_ = 0, references_ = 0, values_ = 0;
};

struct Cost {
  double messages = 0;
  std::size_t remembered = 0;
};

Cost cost_of(std::uint32_t workers, std::size_t references) {
  LargeWorld world(workers, workers + references);
  for (std::size_t made = 0; made < references; made += 4) {
    world.make(3);
    while (world.living() > 10'000) world.drop_one();
  }
  const auto peak = world.sum();
  EXPECT_EQ(peak.forks, world.living());
  EXPECT_EQ(peak.users, world.living());
  EXPECT_EQ(peak.pending_users + peak.pending_children, 0u);
  while (!world.empty()) world.drop_one();
  const auto end = world.sum();
  EXPECT_EQ(end.owners + end.forks + end.users + end.pending_users + end.pending_children, 0u);
  return {world.messages_per_reference(), end.remembered};
}

TEST(RRefScale, CostsTheSameForEveryReferenceInAWorldOfAThousandWorkers) {
  const Cost small = cost_of(10, 10'000), few = cost_of(1000, 10'000), many = cost_of(1000, 100'000);
  fmt::print(
      "control messages per reference: {:.2f} (10 workers), {:.2f} and {:.2f} (1,000 workers; 10,000 and "
      "100,000 references); numbers remembered per worker: {}, {}, {}\n",
      small.messages, few.messages, many.messages, small.remembered, few.remembered, many.remembered);
  // A value shared with three: four deletions, three fork requests, three acceptances.
  for (const Cost& cost : {small, few, many}) EXPECT_DOUBLE_EQ(cost.messages, 10.0 / 4.0);
  EXPECT_LE(small.remembered, 2u * 10) << "an interval for each creator and each holder";
  EXPECT_LE(many.remembered, 2u * 1000);
}

}  // namespace
}  // namespace torchspan::rpc::rref_scale_test
