// Scopes that wait for all their calls, and a worker's debug information.
#include <ATen/ATen.h>

#include <torchspan/rpc/worker.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_wait_scopes {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

using Number = Future<std::int64_t>;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t slow_add(Worker& worker, std::int64_t a, std::int64_t b) {
  nap(worker, seconds(1));
  return a + b;
}
void raise_func() { throw std::domain_error("Expected error"); }
struct Cell {
  explicit Cell(std::int64_t value) : value(value) {}
  std::int64_t get() const { return value; }
  std::int64_t value;
};
struct Keeper {
  explicit Keeper(const RRef<Cell>& kept) : kept(kept) {}
  std::int64_t get() const { return kept.rpc_sync(Function<&Cell::get>{"Cell.get"}); }
  RRef<Cell> kept;
};

constexpr Function<add> kAdd{"add"};
constexpr Function<slow_add> kSlowAdd{"slow_add"};
constexpr Function<raise_func> kRaise{"raise_func"};
constexpr Class<Cell, std::int64_t> kCell{"Cell"};
constexpr Function<&Cell::get> kGet{"Cell.get"};
constexpr Class<Keeper, RRef<Cell>> kKeeper{"Keeper"};
constexpr Function<&Keeper::get> kGetKept{"Keeper.get"};

ClusterOptions world(int workers = 2) {
  return world_of(workers, FunctionTable().add(kAdd, kSlowAdd, kRaise, kCell, kGet, kKeeper, kGetKept));
}

// peer: rpc_test.py wait_all: same
TEST(RpcConformance, WaitAll) {
  on_first(world(), [](Worker& worker) {
    Number sum;
    {
      WaitScope calls(worker);
      sum = calls.rpc_async("worker1", kSlowAdd, 1, 2);
      EXPECT_FALSE(sum.done());
    }
    EXPECT_TRUE(sum.done());
    EXPECT_EQ(sum.wait(), 3);
    const TimePoint begin = now(worker);
    { WaitScope nothing(worker); }
    EXPECT_EQ(now(worker), begin) << "a scope without calls waits for nothing";
  });
}

// peer: rpc_test.py wait_all_multiple_call: same; creations count too
TEST(RpcConformance, WaitAllMultipleCall) {
  on_first(world(), [](Worker& worker) {
    std::vector<Number> sums;
    Number outside;
    RRef<Cell> cell;
    {
      WaitScope calls(worker);
      for (std::int64_t i = 0; i < 20; ++i) {
        sums.push_back(calls.rpc_async("worker1", kAdd, i, 1));
        EXPECT_EQ(calls.rpc_sync("worker1", kAdd, i, 2), i + 2);
      }
      cell = calls.remote("worker1", kCell, 7);
      outside = worker.rpc_async("worker1", kSlowAdd, 1, 2);
      calls.wait();
      EXPECT_TRUE(cell.confirmed_by_owner());
    }
    for (std::int64_t i = 0; i < 20; ++i) {
      EXPECT_TRUE(sums[i].done());
      EXPECT_EQ(sums[i].wait(), i + 1);
    }
    EXPECT_FALSE(outside.done()) << "only what was called through the scope";
    EXPECT_EQ(outside.wait(), 3);
  });
}

// peer: rpc_test.py wait_all_timeout: same
TEST(RpcConformance, WaitAllTimeout) {
  on_first(world(), [](Worker& worker) {
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kTimedOut, "worker1", [&] {
      WaitScope calls(worker, {.timeout = milliseconds(100)});
      static_cast<void>(calls.rpc_async("worker1", kSlowAdd, 1, 2));
      calls.wait();
    });
    EXPECT_LT(now(worker) - begin, milliseconds(105));
  });
}

// peer: rpc_test.py wait_all_raise_in_user_func: differs: `wait()` throws the failure; the destructor does
//   not, so a scope without `wait()` reports none
TEST(RpcConformance, WaitAllRaiseInUserFunc) {
  on_first(world(), [](Worker& worker) {
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] {
      WaitScope calls(worker);
      static_cast<void>(calls.rpc_async("worker1", kRaise));
      calls.wait();
    });
    WaitScope creations(worker);
    auto ignored = creations.remote("worker1", kRaise);
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { creations.wait(); });
  });
}

// peer: rpc_test.py wait_all_raise_in_body: same
TEST(RpcConformance, WaitAllRaiseInBody) {
  on_first(world(), [](Worker& worker) {
    Number sum;
    EXPECT_THROW(
        {
          WaitScope calls(worker);
          sum = calls.rpc_async("worker1", kSlowAdd, 1, 2);
          raise_func();
        },
        std::domain_error);
    EXPECT_TRUE(sum.done()) << "the body's own error leaves the scope once its calls have ended";
  });
}

// peer: rpc_test.py (documented) a scope ends with its first failure: same
TEST(RpcConformance, WaitAllScopeExitsEarly) {
  on_first(world(3), [](Worker& worker) {
    WaitScope calls(worker);
    auto slow = calls.rpc_async("worker2", kSlowAdd, 1, 2);
    const TimePoint begin = now(worker);
    static_cast<void>(calls.rpc_async("worker1", kRaise));
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { calls.wait(); });
    EXPECT_LT(now(worker) - begin, milliseconds(100));
    EXPECT_FALSE(slow.done());
  });
}

// peer: rpc_test.py debug_info: better: a struct that lists every pending and running call with its age and
//   call site
TEST(RpcConformance, DebugInfo) {
  on_first(world(), [](Worker& worker) {
    auto idle = [](const DebugInfo& info) {
      return info.pending.empty() && info.serving.empty() && info.references.owners == 0 &&
             info.references.forks == 0 && info.references.pending_users == 0 &&
             info.references.pending_children == 0;
    };
    const DebugInfo first = worker.debug();
    EXPECT_EQ(first.worker, "worker0");
    EXPECT_TRUE(idle(first)) << first.str();
    EXPECT_EQ(first.calls_sent, 0u);

    auto slow = worker.rpc_async("worker1", kSlowAdd, 1, 2);
    nap(worker, milliseconds(500));
    const DebugInfo during = worker.debug();
    ASSERT_EQ(during.pending.size(), 1u);
    EXPECT_EQ(during.pending[0].call, "slow_add");
    EXPECT_EQ(during.pending[0].to, "worker1");
    EXPECT_EQ(during.pending[0].age, milliseconds(500));
    EXPECT_EQ(during.pending[0].left, milliseconds(59500));
    slow.wait();

    EXPECT_THROW(worker.with({.timeout = milliseconds(100)}).rpc_sync("worker1", kSlowAdd, 1, 2), Error);
    nap(worker, seconds(2));
    const DebugInfo last = worker.debug();
    EXPECT_TRUE(idle(last)) << last.str();
    EXPECT_EQ(last.calls_sent, 2u);
    EXPECT_EQ(last.late_replies, 1u);
    EXPECT_THAT(last.str(), HasSubstr("worker 'worker0': 0 calls wait for replies"));
  });
}

// peer: rpc_test.py/rref rref_context_debug_info: better: counts, and a list with type, size, age, place of
//   creation and holders
TEST(RpcConformance, RrefContextDebugInfo) {
  on_first(world(), [](Worker& worker) {
    const auto references = [&] { return worker.debug().references; };
    {
      RRef<Cell> mine(worker, Cell(5));
      EXPECT_EQ(references().owners, 0u) << "no other worker refers to it";
      auto keeper = worker.remote("worker1", kKeeper, mine);
      EXPECT_EQ(keeper.rpc_sync(kGetKept), 5);
      EXPECT_EQ(references().owners, 1u);
      EXPECT_EQ(references().forks, 1u);

      RRef<Cell> second(worker, Cell(6));
      auto same_keeper = worker.remote("worker1", kKeeper, mine);
      auto other_keeper = worker.remote("worker1", kKeeper, second);
      EXPECT_EQ(same_keeper.rpc_sync(kGetKept) + other_keeper.rpc_sync(kGetKept), 11);
      EXPECT_EQ(references().owners, 2u);
      EXPECT_EQ(references().forks, 3u);
      EXPECT_EQ(references().pending_users, 0u);
      EXPECT_EQ(references().pending_children, 0u);
    }
    nap(worker, seconds(1));
    EXPECT_EQ(references().owners, 0u);
    EXPECT_EQ(references().forks, 0u);
  });
}

}  // namespace
}  // namespace torchspan::rpc_wait_scopes
