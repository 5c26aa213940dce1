// Listings of references for users: while the program runs, and of leaks at its end.
// peer: rpc_test.py/rref rref_context_debug_info
#include <fmt/format.h>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>

#include "rpc/references/control.h"
#include "tests/parity/rpc_faults.h"

namespace torchspan::rpc_rref_listings {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;
using Role = RRefInfo::Role;
using Holders = std::map<std::string, std::size_t>;

/// Cannot be sent, and has unknown size.
struct Board {
  explicit Board(std::int64_t cells) : cells(cells) {}
  std::int64_t cells;
};
struct Keeper {
  explicit Keeper(const RRef<at::Tensor>& kept) : kept(kept) {}
  RRef<at::Tensor> kept;
};
at::Tensor zeros(std::int64_t count) { return at::zeros({count}, at::kDouble); }
std::int64_t cells_of(const RRef<Board>& board) { return board.local_value().cells; }
RRef<Board> same(const RRef<Board>& board) { return board; }
std::int64_t keep_for_a_second(Worker& worker, const RRef<at::Tensor>&) {
  nap(worker, seconds(1));
  return 1;
}
/// What another worker lists.
std::vector<std::string> listed(Worker& worker) {
  std::vector<std::string> lines;
  for (const RRefInfo& info : worker.debug().rrefs()) lines.push_back(info.str());
  return lines;
}

constexpr Class<Board, std::int64_t> kBoard{"Board"};
constexpr Class<Keeper, RRef<at::Tensor>> kKeeper{"Keeper"};
constexpr Function<zeros> kZeros{"zeros"};
constexpr Function<cells_of> kCells{"cells_of"};
constexpr Function<same> kSame{"same"};
constexpr Function<keep_for_a_second> kKeepForASecond{"keep_for_a_second"};
constexpr Function<listed> kListed{"listed"};

ClusterOptions world(int workers = 3) {
  return world_of(workers,
                  FunctionTable().add(kBoard, kKeeper, kZeros, kCells, kSame, kKeepForASecond, kListed));
}

std::vector<RRefInfo> list(const Worker& worker, Role role) {
  std::vector<RRefInfo> list = worker.debug().rrefs();
  std::erase_if(list, [role](const RRefInfo& info) { return info.role != role; });
  return list;
}
std::string place(int line) { return fmt::format("rpc_rref_listings.cpp:{}", line); }

TEST(RpcConformance, ListsValuesWithTypeSizeAgePlaceAndHolders) {
  on_first(world(), [](Worker& worker) {
    RRef<at::Tensor> mine(worker, at::zeros({8, 8}, at::kFloat));
    const int line = __LINE__ - 1;
    EXPECT_TRUE(worker.debug().rrefs().empty()) << "no other worker refers to it";
    auto first = worker.remote("worker1", kKeeper, mine), second = worker.remote("worker2", kKeeper, mine),
         third = worker.remote("worker2", kKeeper, mine);
    for (const auto& keeper : {first, second, third}) keeper.creation().wait();
    nap(worker, seconds(3));
    const auto values = list(worker, Role::kOwner);
    ASSERT_EQ(values.size(), 1u);
    EXPECT_EQ(values[0].type, "Tensor");
    EXPECT_EQ(values[0].bytes, 8u * 8 * 4);
    EXPECT_EQ(values[0].site, place(line));
    EXPECT_EQ(values[0].creator, "worker0");
    EXPECT_EQ(values[0].owner, "worker0");
    EXPECT_EQ(values[0].holders, (Holders{{"worker1", 1}, {"worker2", 2}}));
    EXPECT_GE(values[0].age, seconds(3));
    EXPECT_LT(values[0].age, seconds(4));
    EXPECT_THAT(values[0].str(),
                AllOf(HasSubstr("Tensor, 256 bytes"), HasSubstr("at " + place(line)),
                      HasSubstr("here for 3."), HasSubstr("held by 'worker1', 'worker2' (2 times)")));
    EXPECT_THAT(worker.debug().str(), HasSubstr(values[0].str().substr(0, 20)));
  });
}

TEST(RpcConformance, ListsAtTheOwnerWhereACreatorMadeAValue) {
  on_first(world(), [](Worker& worker) {
    auto tensor = worker.remote("worker1", kZeros, 100);
    const int line = __LINE__ - 1;
    auto board = worker.remote("worker1", kBoard, 5);
    tensor.creation().wait();
    board.creation().wait();
    const auto lines = worker.rpc_sync("worker1", kListed);
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_THAT(lines[0], AllOf(HasSubstr("Tensor, 800 bytes, made by 'worker0' at " + place(line)),
                                HasSubstr("held by 'worker0'")));
    EXPECT_THAT(lines[1],
                AllOf(HasSubstr("Board, made by 'worker0' at " + place(line + 2)), Not(HasSubstr("bytes"))));
  });
}

TEST(RpcConformance, ListsWhereAMethodMadeAValue) {
  on_first(world(), [](Worker& worker) {
    auto board = worker.remote("worker1", kBoard, 5);
    auto cells = board.remote(kCells);
    const int line = __LINE__ - 1;
    cells.creation().wait();
    const auto users = list(worker, Role::kUser);
    ASSERT_EQ(users.size(), 2u);
    EXPECT_EQ(users[1].site, place(line));
  });
}

TEST(RpcConformance, ListsReferencesToValuesElsewhere) {
  on_first(world(), [](Worker& worker) {
    auto board = worker.remote("worker1", kBoard, 5);
    const int line = __LINE__ - 1;
    EXPECT_EQ(board.rpc_sync(kCells), 5);
    const RRef<Board> copy = worker.rpc_sync("worker2", kSame, board);
    nap(worker, seconds(1));
    const auto users = list(worker, Role::kUser);
    ASSERT_EQ(users.size(), 2u);
    for (const RRefInfo& user : users) {
      EXPECT_THAT(user.type, HasSubstr("Board"));
      EXPECT_EQ(user.owner, "worker1");
      EXPECT_EQ(user.creator, "worker0");
      EXPECT_EQ(user.value, users[0].value);
    }
    EXPECT_NE(users[0].fork, users[1].fork);
    EXPECT_EQ(users[0].site, place(line));
    EXPECT_EQ(users[0].from, "");
    EXPECT_EQ(users[1].site, "");
    EXPECT_EQ(users[1].from, "worker2");
  });
}

TEST(RpcConformance, ListsReferencesInFlight) {
  SimCluster cluster(world());
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    auto tensor = worker.remote("worker1", kZeros, 100);
    tensor.creation().wait();
    cluster.network().block(requests_of(rpc::ForkRequest::kType));
    const auto call = worker.rpc_async("worker2", kKeepForASecond, tensor);
    nap(worker, milliseconds(500));
    const auto children = list(worker, Role::kPendingChild);
    ASSERT_EQ(children.size(), 1u);
    EXPECT_EQ(children[0].holders, (Holders{{"worker2", 1}}));
    EXPECT_THAT(children[0].str(), AllOf(HasSubstr("in flight to 'worker2'"), HasSubstr("'worker1'")));
    const auto there = worker.rpc_sync("worker2", kListed);
    ASSERT_EQ(there.size(), 1u);
    EXPECT_THAT(there[0], AllOf(HasSubstr("unconfirmed reference " + children[0].fork),
                                HasSubstr("on 'worker1'"), HasSubstr("sent by 'worker0'")));
    cluster.network().unblock();
    EXPECT_EQ(call.wait(), 1);
    nap(worker, seconds(2));
    EXPECT_TRUE(list(worker, Role::kPendingChild).empty());
    EXPECT_TRUE(worker.rpc_sync("worker2", kListed).empty());
  });
}

TEST(RpcConformance, ListsEveryReferenceOnceHoweverMany) {
  SimCluster cluster(world(2));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    constexpr std::size_t kMany = 2000;
    std::vector<RRef<Board>> boards;
    for (std::size_t i = 0; i < kMany; ++i) boards.push_back(worker.remote("worker1", kBoard, 1));
    for (const auto& board : boards) board.creation().wait();
    std::set<std::string> forks;
    const auto users = list(worker, Role::kUser);
    for (const RRefInfo& user : users) forks.insert(user.fork);
    EXPECT_EQ(users.size(), kMany);
    EXPECT_EQ(forks.size(), kMany) << "each once";
    EXPECT_THAT(worker.debug().str(), HasSubstr(fmt::format("and {} references more", kMany - 20)));
    boards.clear();
    nap(worker, seconds(1));
    EXPECT_TRUE(worker.debug().rrefs().empty());
  });
}

/// Shuts every worker down after worker 0's `first`; returns what that threw. Holds the RRefs that `first`
/// returns.
std::vector<std::exception_ptr> shut_down_holding(ClusterOptions options,
                                                  const std::function<void(Worker&)>& first) {
  SimCluster cluster(std::move(options));
  return cluster.try_services([&](rpc::WorkerService& service) {
    if (service.worker().rank() == 0) first(service.worker());
    service.shutdown(cluster.executor().deadline_in(std::chrono::minutes(5)));
  });
}

ClusterOptions strict(bool strict_leaks) {
  ClusterOptions options = world();
  options.adjust = [=](int, WorkerPlan& plan) { plan.service.strict_leaks = strict_leaks; };
  return options;
}

// peer: rpc_test.py/rref rref_leak: same with `strict_leaks`: the owner's shutdown throws an error that lists
//   type, place of creation and holders
TEST(RpcConformance, RrefLeak) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    ClusterOptions options = strict(true);
    options.seed = seed;
    std::vector<RRef<Board>> held;
    int line = 0;
    const auto failures = shut_down_holding(options, [&](Worker& worker) {
      for (int i = 0; i < 30; ++i) held.push_back(worker.remote("worker1", kBoard, i));
      line = __LINE__ - 1;
    });
    EXPECT_FALSE(failures[0]) << describe(failures[0]).text;
    EXPECT_FALSE(failures[2]) << describe(failures[2]).text;
    ASSERT_TRUE(failures[1]) << "seed " << seed;
    const Error error = to_error(failures[1]);
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("worker 'worker1' was shut down while others referred to 30 of its values"),
                      HasSubstr("Board, made by 'worker0' at " + place(line)), HasSubstr("held by 'worker0'"),
                      HasSubstr("and 10 more")));
  }
}

TEST(RpcConformance, StrictShutdownOfATidyProgramThrowsNothing) {
  const auto failures = shut_down_holding(strict(true), [](Worker& worker) {
    auto board = worker.remote("worker1", kBoard, 5);
    EXPECT_EQ(worker.rpc_sync("worker2", kSame, board).rpc_sync(kCells), 5);
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

/// What a worker throws when it leaves an open world whose first worker holds one of its values, if `holds`.
std::exception_ptr leave_while_held(bool strict_leaks, bool holds) {
  ClusterOptions options = strict(strict_leaks);
  options.workers = 1;
  options.open = true;
  SimCluster cluster(options);
  std::exception_ptr thrown;
  cluster.run([&](Worker& worker) {
    Thread life = cluster.start(1, 0, [&](rpc::WorkerService& service) {
      nap(service.worker(), milliseconds(200));
      try {
        service.shutdown(cluster.executor().deadline_in(seconds(60)));
      } catch (...) {
        thrown = std::current_exception();
      }
    });
    nap(worker, milliseconds(100));
    auto board = worker.remote(1, kBoard, 1);
    board.creation().wait();
    if (!holds) board = {};
    life.join();
    nap(worker, seconds(1));
    if (!holds) return;
    // Its value and its rank are gone; the connection failed, not the call.
    expect_error(ErrorKind::kDisconnected, "worker1", [&] { board.rpc_sync(kCells); });
    expect_error(ErrorKind::kDisconnected, "worker1", [&] { board.remote(kCells).creation().wait(); });
  });
  return thrown;
}

TEST(RpcConformance, RrefLeakInAnOpenWorld) {
  const auto thrown = leave_while_held(true, true);
  ASSERT_TRUE(thrown);
  EXPECT_THAT(to_error(thrown).what(),
              AllOf(HasSubstr("worker 'worker1' was shut down while others referred to 1 of its values"),
                    HasSubstr("Board, made by 'worker0' at "), HasSubstr("held by 'worker0'")));
  EXPECT_FALSE(leave_while_held(true, false));
}

TEST(RpcConformance, WarnsOfValuesInUseByOthersInAnOpenWorld) {
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(leave_while_held(false, false));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(leave_while_held(false, true));
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      AllOf(HasSubstr(
                "torchspan[worker1] warning: 1 values are destroyed although other workers refer to them"),
            HasSubstr("leak: value 0:1, "), HasSubstr("Board, made by 'worker0' at "),
            HasSubstr("held by 'worker0'")));
}

// peer: rpc_test.py/rref ignore_rref_leak: same: references that programs hold are released silently, unless
//   `strict_leaks` is set
TEST(RpcConformance, IgnoreRrefLeak) {
  std::vector<RRef<Board>> held;
  ::testing::internal::CaptureStderr();
  const auto failures = shut_down_holding(
      strict(false), [&](Worker& worker) { held.push_back(worker.remote("worker1", kBoard, 1)); });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
  expect_error(ErrorKind::kCancelled, "was released when", [&] { held[0].rpc_sync(kCells); });
}

std::string warnings_of_a_lost_delete(bool report_leaks) {
  ClusterOptions options = world(2);
  options.adjust = [&](int, WorkerPlan& plan) { plan.service.report_leaks = report_leaks; };
  SimCluster cluster(options);
  ::testing::internal::CaptureStderr();
  const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
    if (service.worker().rank() == 0) {
      auto tensor = service.worker().remote("worker1", kZeros, 100);
      tensor.creation().wait();
      cluster.network().drop_if(requests_of(rpc::UserDelete::kType));
    }
    service.shutdown(cluster.executor().deadline_in(std::chrono::minutes(5)));
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
  return ::testing::internal::GetCapturedStderr();
}

// peer: rpc_test.py/rref (documented) references that were not released: same: a warning with type, place of
//   creation and holders; `report_leaks = false` disables it
TEST(RpcConformance, WarnsAtShutdownAboutUnreturnedReferences) {
  const std::string warnings = warnings_of_a_lost_delete(true);
  EXPECT_THAT(warnings, AllOf(HasSubstr("torchspan[worker1] warning: 1 values are destroyed"),
                              HasSubstr("torchspan[worker1] warning: leak: value 0:1, Tensor, 800 bytes"),
                              HasSubstr("held by 'worker0'")));
  const std::string silent = warnings_of_a_lost_delete(false);
  EXPECT_THAT(silent, AllOf(Not(HasSubstr("values are destroyed")), Not(HasSubstr("leak")),
                            Not(HasSubstr("held by"))));
}

}  // namespace
}  // namespace torchspan::rpc_rref_listings
