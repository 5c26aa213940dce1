// Every operation of a group, when a rank is late, dead, or calls another one: the error names the rank and the call.
#include "tests/conformance/collective_every_operation.h"

#include <atomic>
#include <csignal>
#include <gmock/gmock.h>
#include <optional>

namespace torchspan::testing {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanksOfCalls = 3;

template <class T>
std::function<void()> waiter(const Future<T>& future) {
  return [future] { static_cast<void>(future.wait(seconds(60))); };
}

}  // namespace

std::vector<GroupCall> all_group_calls() {
  const auto three = [] { return at::ones({3}); };
  return {
      {"all_reduce", true, [=](const Group& group) { return waiter(group.all_reduce(three())); }},
      {"all_reduce", true, [](const Group& group) { return waiter(group.all_reduce(at::ones({300000}))); }},
      {"reduce_scatter", true,
       [](const Group& group) {
         return waiter(group.reduce_scatter(at::ones({group.size(), 2})));
       }},
      {"reduce_scatter", true,
       [](const Group& group) {
         return waiter(group.reduce_scatter_tensor(at::zeros({2}), at::ones({group.size(), 2})));
       }},
      {"all_gather", true, [=](const Group& group) { return waiter(group.all_gather(three())); }},
      {"all_gather", true,
       [=](const Group& group) {
         return waiter(group.all_gather_into_tensor(at::zeros({3L * group.size()}), three()));
       }},
      {"broadcast", true, [=](const Group& group) { return waiter(group.broadcast(three(), kVictim)); }},
      {"all_to_all", true,
       [=](const Group& group) {
         return waiter(
             group.all_to_all(std::vector<at::Tensor>(static_cast<std::size_t>(group.size()), three())));
       }},
      {"gather", true, [=](const Group& group) { return waiter(group.gather(three(), 0)); }},
      {"scatter", true, [=](const Group& group) { return waiter(group.scatter(three(), {}, kVictim)); }},
      {"reduce", true, [=](const Group& group) { return waiter(group.reduce(three(), 0)); }},
      {"all_reduce_coalesced", true,
       [=](const Group& group) {
         return waiter(all_reduce_coalesced(group, {three(), at::ones({2, 2})}));
       }},
      {"reduce_scatter_coalesced", true,
       [=](const Group& group) {
         return waiter(reduce_scatter_coalesced(group, {at::ones({group.size(), 2})}));
       }},
      {"all_gather_into_tensor_coalesced", true,
       [=](const Group& group) {
         return waiter(all_gather_into_tensor_coalesced(group, {at::zeros({group.size(), 3})}, {three()}));
       }},
      {"all_gather_bytes", true,
       [](const Group& group) { return [group] { static_cast<void>(group.all_gather_bytes(Bytes(3))); }; }},
      {"barrier", true, [](const Group& group) { return [group] { group.barrier(); }; }},
      {"send(Float [3] to rank 1, tag 2)", false,
       [=](const Group& group) { return waiter(group.send(three(), kVictim, 2)); }},
      {"send(Float [300000] to rank 1, tag 2)", false,
       [](const Group& group) { return waiter(group.send(at::ones({300000}), kVictim, 2)); }},
      {"recv(Float [3] from rank 1, tag 2)", false,
       [=](const Group& group) { return waiter(group.recv(three(), kVictim, 2)); }},
      {"recv(Float [3] from any rank, tag 2)", false,
       [=](const Group& group) { return waiter(group.recv(three(), kAnySource, 2)); }},
  };
}

namespace {

void dies_before_every_operation(const GroupOptions& options) {
  const auto calls = all_group_calls();
  with_world([&](Runtime& runtime, rendezvous::Membership& world) {
    std::vector<Group> groups;
    for (std::size_t i = 0; i < calls.size(); ++i)
      groups.push_back(make_group_of_suite(runtime, world, options));
    for (const Group& group : groups) group.barrier();
    world.barrier("test.begun", {}, runtime.executor.deadline_in(seconds(60)));
    if (world.self().rank == kVictim) kill(getpid(), SIGKILL);
    std::vector<std::function<void()>> pending;
    for (std::size_t i = 0; i < calls.size(); ++i) pending.push_back(calls[i].begin(groups[i]));
    for (std::size_t i = 0; i < calls.size(); ++i) {
      expect_error(ErrorKind::kDisconnected, {"worker1", "rank 1", calls[i].name}, pending[i]);
    }
    // The end of a survivor must not be the death that the other one sees first.
    world.barrier("test.end", {0, 2}, runtime.executor.deadline_in(seconds(30)));
  });
}

/// Without the rows of devices: their messages and CPU tensors go through the same code.
std::vector<CollectiveRow> rows_of_three() {
  std::vector<CollectiveRow> rows = rows_of(kRanksOfCalls);
  std::erase_if(rows, [](const CollectiveRow& row) {
    return is_device_kind(row.backend) || row.backend == BackendKind::kMpi;
  });
  return rows;
}

class CollectiveEveryOperation : public CollectiveSuite {
 protected:
  /// Gloo has limits of its own, in real time.
  static bool over_gloo() {
    return GetParam().backend == BackendKind::kC10d ||
           (GetParam().backend == BackendKind::kHierarchical && GetParam().network == Network::kIsolated);
  }
  /// Runs `call` for every operation in a group of its own, on all ranks; then waits for all, and checks each error. If
  /// `timeout` passes meanwhile, it need not be waited for.
  void run_all(Duration timeout,
               const std::function<std::function<void()>(const GroupCall&, const Group&)>& begin,
               const std::function<void(const GroupCall&, const Group&, const Error&)>& check,
               bool passes = false) {
    GroupOptions options = this->options();
    options.timeout = timeout;
    if (passes) world_.make_clocks();
    const auto calls = all_group_calls();
    const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
    std::atomic<std::size_t> ranks_that_wait{0};
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           std::vector<Group> groups;
           for (std::size_t i = 0; i < calls.size(); ++i) {
             groups.push_back(Group::make(self.runtime, self.membership, options));
           }
           for (const Group& group : groups) group.barrier(seconds(60));
           std::vector<std::optional<Error>> errors(calls.size());
           std::atomic<std::size_t> begun{0};
           {
             std::vector<Thread> waiting;
             for (std::size_t i = 0; i < calls.size(); ++i) {
               const auto wait = begin(calls[i], groups[i]);
               if (!wait) continue;
               waiting.push_back(world_.executor().spawn("wait", [&errors, &begun, i, wait] {
                 ++begun;
                 try {
                   wait();
                 } catch (...) {
                   errors[i] = to_error(std::current_exception());
                 }
               }));
             }
             if (passes) {
               while (begun < waiting.size()) world_.executor().sleep(milliseconds(1));
               if (++ranks_that_wait == world_.ranks_here()) world_.move_clocks(timeout + seconds(5));
             }
           }
           self.membership.barrier("test.end", {}, in(seconds(60)));
           for (std::size_t i = 0; i < calls.size(); ++i) {
             SCOPED_TRACE(::testing::Message()
                          << "call " << i << ", " << calls[i].name << ", rank " << self.rank);
             check(calls[i], groups[i],
                   errors[i].value_or(Error(ErrorKind::kCancelled, "nothing was thrown")));
           }
         })) {
      EXPECT_FALSE(failure) << describe(failure).text;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveEveryOperation, ::testing::ValuesIn(rows_of_three()), row_name);

TEST_P(CollectiveEveryOperation, NamesALateRankAndTheCallThatItMisses) {
  run_all(
      over_gloo() ? seconds(4) : seconds(20),
      [](const GroupCall& call, const Group& group) {
        return group.rank() == kVictim ? std::function<void()>() : call.begin(group);
      },
      [](const GroupCall& call, const Group& group, const Error& error) {
        if (group.rank() == kVictim) return;
        EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
        EXPECT_THAT(error.what(), AllOf(HasSubstr("worker1"), HasSubstr(call.name)));
      },
      /*passes=*/!over_gloo());
}

TEST_P(CollectiveEveryOperation, NamesTheCallsOfTwoRanksThatDiffer) {
  run_all(
      seconds(60),
      [](const GroupCall& call, const Group& group) {
        if (!call.collective) return std::function<void()>();
        if (group.rank() != kVictim) return call.begin(group);
        return waiter(group.broadcast(at::ones({77}), 2));
      },
      [](const GroupCall& call, const Group&, const Error& error) {
        if (!call.collective) return;
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("worker1"), HasSubstr("broadcast(Float [77]"), HasSubstr(call.name)));
      });
}

void expect_survivors_of(const std::string& scenario, int hosts = 1) {
  ProcessWorld world(kRanksOfCalls);
  for (int rank = 0; rank < kRanksOfCalls; ++rank) {
    std::map<std::string, std::string> host;
    if (hosts > 1) host["TEST_HOST"] = "host" + std::to_string(rank % hosts);
    world.start(rank, scenario, host);
  }
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(world.process(rank).wait(world.executor(), seconds(60))) << "rank " << rank << " still runs";
    EXPECT_EQ(world.process(rank).exit_code(), 0) << world.process(rank).output();
  }
}

TEST(CollectiveDeathsInEveryOperation, AreNamedOverSharedMemory) {
  expect_survivors_of("dies_before_every_operation");
}
TEST(CollectiveDeathsInEveryOperation, AreNamedOverTheNetwork) {
  expect_survivors_of("dies_before_every_operation_of_network");
}
TEST(CollectiveDeathsInEveryOperation, AreNamedByHierarchicalGroups) {
  expect_survivors_of("dies_before_every_operation_of_hierarchical", /*hosts=*/2);
}
#if defined(TORCHSPAN_GLOO)
TEST(CollectiveDeathsInEveryOperation, AreNamedByGroupsOverGloo) {
  expect_survivors_of("dies_before_every_operation_of_gloo");
}
#endif

}  // namespace

std::map<std::string, Scenario> every_operation_scenarios() {
  const auto with = [](BackendKind backend) {
    return [backend] { dies_before_every_operation({.backend = backend, .timeout = seconds(60)}); };
  };
  return {{"dies_before_every_operation", with(BackendKind::kSharedMemory)},
          {"dies_before_every_operation_of_network", with(BackendKind::kNetwork)},
          {"dies_before_every_operation_of_hierarchical", with(BackendKind::kHierarchical)},
          {"dies_before_every_operation_of_gloo", with(BackendKind::kC10d)}};
}

}  // namespace torchspan::testing
