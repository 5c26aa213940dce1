#include "collective/world_link.h"

#include <cstddef>
#include <gtest/gtest.h>
#include <memory>
#include <new>

#include "collective/shm/peer_memory.h"
#include "tests/support/processes.h"

namespace torchspan::collective::world_link_test {
namespace {

/// Counts the blocks that it has allocated and not freed.
template <class T>
struct CountingAllocator {
  using value_type = T;
  explicit CountingAllocator(int& blocks) : blocks(&blocks) {}
  template <class Other>
  CountingAllocator(const CountingAllocator<Other>& other) : blocks(other.blocks) {}
  T* allocate(std::size_t count) {
    ++*blocks;
    return static_cast<T*>(::operator new(count * sizeof(T)));
  }
  void deallocate(T* block, std::size_t) {
    --*blocks;
    ::operator delete(block);
  }
  friend bool operator==(const CountingAllocator&, const CountingAllocator&) { return true; }

  int* blocks;
};

struct IdleListener final : WorldListener {
  void member_died(const rendezvous::Member&, const Error&) override {}
  void member_left(const rendezvous::Member&) override {}
  void world_ended(const Error&) override {}
  void world_closing() override {}
};

class WorldLinkTest : public ::testing::Test {
 protected:
  WorldLinkTest() {
    const std::string address = "unix:" + folder_.path();
    rendezvous::MembershipOptions options;
    options.name = "worker0";
    options.store_address = address + "/store";
    options.address = address + "/worker0";
    membership_ = rendezvous::Membership::join(
        *runtime_, rendezvous::stream_transports(*executor_, net::Secret::random()), options);
    link_ = WorldLink::make(runtime_, *membership_);
  }
  ~WorldLinkTest() override { membership_->leave(executor_->deadline_in(std::chrono::seconds(60))); }

  testing::TemporaryFolder folder_;
  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<Runtime> runtime_ = std::make_shared<Runtime>(*executor_, "worker0", LogLevel::kOff);
  std::unique_ptr<rendezvous::Membership> membership_;
  std::shared_ptr<WorldLink> link_;
};

/// A world lives long, and a program may split its groups for every epoch.
TEST_F(WorldLinkTest, NothingIsKeptOfPartsThatEndedInAWorldWithoutDeaths) {
  int blocks = 0;
  const auto memory = std::make_shared<shm::PeerMemory>(
      link_, std::vector<shm::PeerIdentity>{{0, 1, "worker0"}}, 0, shm::Arena::make(std::uint64_t{16} << 20));
  for (int part = 0; part < 100; ++part) {
    const auto listener = std::allocate_shared<IdleListener>(CountingAllocator<IdleListener>(blocks));
    link_->add(listener);
    memory->add(std::shared_ptr<shm::OpQueue>(
        std::allocate_shared<IdleListener>(CountingAllocator<IdleListener>(blocks)), nullptr));
  }
  EXPECT_LE(blocks, 2) << "at most the last part of each";
}

}  // namespace
}  // namespace torchspan::collective::world_link_test
