// All ranks of a group learn of every failure in it, with the name of the failing rank.
#include <atomic>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <optional>
#include <sys/resource.h>

#include <ATen/ATen.h>

#include "core/api/descriptor.h"
#include "core/api/step_part.h"
#include "tests/conformance/collective_backends.h"
#include "tests/support/errors.h"

namespace torchspan::testing::collective_failures {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class CollectiveFailures : public CollectiveSuite {
 protected:
  /// Runs `body` with a group of all ranks and returns what each of them threw.
  std::vector<Error> errors_of(std::function<void(Group&)> body) {
    std::vector<Error> errors;
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           Group group = make_group_of_suite(self.runtime, self.membership, options());
           try {
             body(group);
           } catch (...) {
             // The end of a rank must not be the error that the others see.
             self.membership.barrier("test.end", {}, world_.executor().deadline_in(seconds(60)));
             throw;
           }
           self.membership.barrier("test.end", {}, world_.executor().deadline_in(seconds(60)));
         })) {
      errors.push_back(failure ? to_error(failure) : Error(ErrorKind::kInvalid, "nothing was thrown"));
    }
    return errors;
  }
};
/// What `body` throws.
std::string error_text(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Only our own backends can notify the other ranks. With Gloo and Open MPI they time out.
class CollectiveFailureReports : public CollectiveFailures {};

/// A group of one rank depends on no other rank.
std::vector<CollectiveRow> rows_of_several(bool ours_only) {
  std::vector<CollectiveRow> rows = collective_rows();
  std::erase_if(rows, [=](const CollectiveRow& row) {
    const bool ours = row.backend == BackendKind::kSharedMemory || row.backend == BackendKind::kNetwork;
    return row.ranks == 1 || (ours_only && !ours);
  });
  return rows;
}
/// Each row takes as long as a limit, of the test or of the group. What then happens does not depend on the number of ranks.
class CollectiveAbsences : public CollectiveFailures {};
/// Our own backends on CPUs, also the one that is made of two.
class CollectiveTimeouts : public CollectiveFailures {};
std::vector<CollectiveRow> rows_with_timeouts() {
  std::vector<CollectiveRow> rows = rows_of_several(true);
  for (const CollectiveRow& row : rows_of_several(false)) {
    if (row.backend == BackendKind::kHierarchical && row.network == Network::kEncrypted) rows.push_back(row);
  }
  return rows;
}
/// The same on CPUs and devices. Over Gloo and Open MPI, others may wait for their timeout when a rank drops its group.
class CollectiveDrops : public CollectiveFailures {};
std::vector<CollectiveRow> rows_that_tell_of_drops() {
  std::vector<CollectiveRow> rows = rows_with_timeouts();
  for (const CollectiveRow& row : rows_of_several(false)) {
    if (row.backend == BackendKind::kNccl || row.backend == BackendKind::kCudaIpc) rows.push_back(row);
  }
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveDrops, ::testing::ValuesIn(rows_that_tell_of_drops()), row_name);
/// What an idle rank does depends on its place in its host, and no further on the number of ranks.
class CollectiveIdleRanks : public CollectiveFailures {};
std::vector<CollectiveRow> rows_with_idle_ranks() {
  std::vector<CollectiveRow> rows = rows_that_tell_of_drops();
  std::erase_if(rows, [](const CollectiveRow& row) {
    return row.ranks > 3 && row.backend != BackendKind::kHierarchical;
  });
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveIdleRanks, ::testing::ValuesIn(rows_with_idle_ranks()),
                         row_name);
/// Each row takes as long as several limits. What then happens does not depend on the number of ranks.
std::vector<CollectiveRow> three_with_timeouts() {
  std::vector<CollectiveRow> rows = rows_with_timeouts();
  std::erase_if(rows, [](const CollectiveRow& row) { return row.ranks != 3; });
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveTimeouts, ::testing::ValuesIn(three_with_timeouts()), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CollectiveTimeouts);
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveAbsences, ::testing::ValuesIn(rows_of(3)), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CollectiveAbsences);
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveFailures, ::testing::ValuesIn(rows_of_several(false)), row_name);
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveFailureReports, ::testing::ValuesIn(rows_of_several(true)),
                         row_name);

// peer: c10d allreduce_error
TEST_P(CollectiveFailures, NamesTwoRanksThatCalledDifferentOperations) {
  for (const Error& error : errors_of([&](Group& group) {
         group.barrier();
         if (group.rank() == 1) {
           group.broadcast(at::ones({3}), 0).wait();
         } else {
           group.all_reduce(at::ones({3})).wait();
         }
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker0"), HasSubstr("all_reduce(Float [3], sum)"),
                                    HasSubstr("worker1"), HasSubstr("broadcast(Float [3] from rank 0)")));
  }
}

// peer: c10d allreduce_error, type_error, duplicate_name_error: better: the peers abort or hang; operations
//   are matched by order, not by name
TEST_P(CollectiveFailures, NoticesDifferencesOfDtypeShapeRootAndReduction) {
  const std::vector<std::function<void(Group&, bool)>> calls = {
      [](Group& group, bool odd) { group.all_reduce(at::ones({3}, odd ? at::kFloat : at::kInt)).wait(); },
      [](Group& group, bool odd) { group.all_reduce(at::ones({odd ? 3 : 4})).wait(); },
      [](Group& group, bool odd) { group.all_reduce(at::ones({odd ? 300000 : 300001})).wait(); },
      [](Group& group, bool odd) { group.all_reduce(at::ones({3}), odd ? kSum : kProduct).wait(); },
      [](Group& group, bool odd) { group.broadcast(at::ones({3}), odd ? 0 : 1).wait(); },
      [](Group& group, bool odd) {
        group.all_gather(at::ones({3, odd ? 1 : 2})).wait();
      },
  };
  for (const auto& call : calls) {
    for (const Error& error : errors_of([&](Group& group) { call(group, group.rank() == ranks() - 1); })) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("worker0"), HasSubstr("worker" + std::to_string(ranks() - 1))));
    }
  }
}

TEST_P(CollectiveFailures, NoticesCallsOfDifferentPartsOfAPipelinesStep) {
  for (const Error& error : errors_of([&](Group& group) {
         const int micro_batch = group.rank() == ranks() - 1 ? 2 : 3;
         const StepPartScope part({StepPart::Kind::kForward, 1, micro_batch, -1, 7});
         EXPECT_EQ(group.all_reduce(at::ones({3}), kMax).wait()[0].item<float>(), 1);
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("forward of micro-batch 3 through layer range 1 of step 7"),
                                    HasSubstr("forward of micro-batch 2 through layer range 1 of step 7")));
  }
}

TEST_P(CollectiveFailures, NamesRanksWhoseSparseTensorsDifferInTheirSparseDimensions) {
  for (const Error& error : errors_of([&](Group& group) {
         const bool odd = group.rank() == ranks() - 1;
         // The ranks in between agree with all others.
         const at::Tensor mine =
             odd ? at::sparse_coo_tensor(at::tensor({1L, 2L}).view({2, 1}), at::ones({1}), {5, 3})
             : group.rank() == 0
                 ? at::sparse_coo_tensor(at::tensor({1L}).view({1, 1}), at::ones({1, 3}), {5, 3})
                 : at::sparse_coo_tensor(at::empty({2, 0}, at::kLong), at::empty({0}), {5, 3});
         group.all_reduce(mine).wait();
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
    EXPECT_THAT(
        error.what(),
        AllOf(HasSubstr("worker0"), HasSubstr("sparse Float [5, 3], sum) with 1 sparse dimensions"),
              HasSubstr("worker" + std::to_string(ranks() - 1)), HasSubstr("with 2 sparse dimensions")));
  }
}

// peer: c10d testWaitDelay
TEST_P(CollectiveFailureReports, StaysBrokenWithTheFirstCause) {
  for (const Error& error : errors_of([&](Group& group) {
         const Error cause(ErrorKind::kCancelled, "the trainer gave up");
         if (group.rank() == 0) group.abort(cause);
         EXPECT_THROW(group.all_reduce(at::ones({3})).wait(), Error);
         EXPECT_THROW(group.barrier(), Error);
         group.all_gather(at::ones({400000})).wait();
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the trainer gave up"), HasSubstr("worker0")));
  }
}

// peer: c10d `testWaitDelay`, abort: same; Gloo and Open MPI notify no rank
TEST_P(CollectiveFailureReports, AbortEndsTheOperationsOfOtherRanks) {
  for (const Error& error : errors_of([&](Group& group) {
         if (group.rank() == 1) {
           group.abort(Error(ErrorKind::kCancelled, "enough"));
           group.barrier();
         } else {
           group.all_reduce(at::ones({1 << 18})).wait();
         }
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    EXPECT_THAT(error.what(), HasSubstr("enough"));
  }
}

/// The first rank of a host once slept through an abort() of another rank of its host, for which other hosts waited.
TEST_P(CollectiveIdleRanks, PassOnTheAbortOfEachOtherRank) {
  GroupOptions options = this->options();
  options.timeout = seconds(20);
  // The suite's wrapper of device groups has no failure().
  const bool on_device = options.backend == BackendKind::kNccl || options.backend == BackendKind::kCudaIpc;
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         const auto barrier = [&](const char* tag) {
           self.membership.barrier(tag, {}, world_.executor().deadline_in(seconds(60)));
         };
         for (int idle = 0; idle < std::min(ranks(), 3); ++idle) {
           for (int aborting = 0; aborting < ranks(); ++aborting) {
             if (aborting == idle) continue;
             SCOPED_TRACE(fmt::format("rank {} of {}: rank {} aborts, rank {} is idle", self.rank, ranks(),
                                      aborting, idle));
             const Group group = make_group_of_suite(self.runtime, self.membership, options);
             group.barrier();
             barrier("test.begin");
             if (self.rank == aborting) {
               group.abort(Error(ErrorKind::kCancelled, "enough"));
             } else if (self.rank != idle) {
               const Error error = error_of([&] { group.all_reduce(at::ones({1 << 18})).wait(); });
               EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
               EXPECT_THAT(error.what(), HasSubstr("enough"));
             }
             barrier("test.reported");
             const Deadline limit = world_.executor().deadline_in(seconds(30));
             while (!on_device && !group.backend()->failure() && !limit.passed(world_.executor().now()))
               world_.executor().sleep(milliseconds(1));
             EXPECT_THAT(error_text([&] { group.all_reduce(at::ones({3})).wait(); }), HasSubstr("enough"));
             EXPECT_FALSE(limit.passed(world_.executor().now()));
             barrier("test.next");
           }
         }
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
}

/// What the program has is the whole group; wrappers such as DistributedDataParallel run in a split of it.
TEST_P(CollectiveFailureReports, AbortReachesTheSplitsAndTheirSplits) {
  for (const Error& error : errors_of([&](Group& group) {
         const Group part = group.split(0, group.rank());
         const Group inner = part.split(0, group.rank());
         const auto gone = [&] { return group.split(0, group.rank()); }().all_reduce(at::ones({2}));
         EXPECT_TRUE(gone.wait_for(seconds(60)));
         if (group.rank() == 1) group.abort(Error(ErrorKind::kCancelled, "enough"));
         EXPECT_THAT(error_text([&] { inner.barrier(); }), HasSubstr("enough"));
         part.all_reduce(at::ones({1 << 18})).wait();
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    EXPECT_THAT(error.what(), HasSubstr("enough"));
    EXPECT_EQ(error.message().find("aborted the group"), error.message().rfind("aborted the group"))
        << error.what();
  }
}

TEST_P(CollectiveFailureReports, AnAbortWithTheErrorOfAnotherGroupNamesTheFirstAbortOnly) {
  for (const Error& error : errors_of([&](Group& group) {
         const Group part = group.split(0, group.rank());
         if (group.rank() == 1) part.abort(Error(ErrorKind::kCancelled, "enough"));
         try {
           part.all_reduce(at::ones({1 << 18})).wait();
         } catch (const Error& of_part) {
           group.abort(of_part);
         }
         group.all_reduce(at::ones({3})).wait();
       })) {
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    EXPECT_THAT(error.what(), HasSubstr("enough"));
    EXPECT_EQ(error.message().find("aborted the group"), error.message().rfind("aborted the group"))
        << error.what();
  }
}

TEST_P(CollectiveFailures, ATimeoutOfZeroIsNoLimit) {
  GroupOptions options = this->options();
  options.timeout = Duration::zero();
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         const Group group = make_group_of_suite(self.runtime, self.membership, options);
         EXPECT_EQ(group.all_reduce(at::ones({3})).wait()[0].item<int>(), ranks());
         group.barrier();
         if (ranks() == 1) return;
         const Group part = group.split(0, self.rank);
         EXPECT_EQ(part.all_reduce(at::ones({300000})).wait()[0].item<int>(), ranks());
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
}

TEST_P(CollectiveFailures, WithoutALimitMessagesFailWithTheirGroup) {
  if (ranks() == 1 || is_device_kind(GetParam().backend)) return;  // those groups have no messages
  GroupOptions options = this->options();
  options.timeout = Duration::zero();
  const auto failures = world_.try_each([&](CollectiveWorld::Rank self) {
    const Group group = make_group_of_suite(self.runtime, self.membership, options);
    const auto from_one = group.recv(at::empty({3}), self.rank == 0 ? 1 : 0);
    const auto from_any = group.recv(at::empty({3}), kAnySource);
    self.membership.barrier("all_wait", {}, self.runtime.executor.deadline_in(std::chrono::minutes(1)));
    if (self.rank == 0) group.abort(Error(ErrorKind::kCancelled, "the trainer gave up"));
    // Rank 0 leaves the world after its abort.
    const auto is_named = AnyOf(HasSubstr("the trainer gave up"), HasSubstr("it left the world"));
    EXPECT_THAT(error_text([&] { from_one.wait(std::chrono::seconds(30)); }), is_named);
    EXPECT_THAT(error_text([&] { from_any.wait(std::chrono::seconds(30)); }), is_named);
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

/// Fills the descriptors of this process while it exists.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit tight = before_;
    tight.rlim_cur = 512;
    setrlimit(RLIMIT_NOFILE, &tight);
    for (int fd = open("/dev/null", O_RDONLY | O_CLOEXEC); fd >= 0;
         fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) {
      taken_.emplace_back(fd);
    }
  }
  ~NoDescriptors() {
    taken_.clear();
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoDescriptors(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<Descriptor> taken_;
};

TEST(CollectiveDescriptors, AGroupWithoutDescriptorsSaysThatTheLimitIsTooLow) {
  CollectiveWorld world(2);
  std::optional<NoDescriptors> none;
  for (const auto& failure : world.try_each([&](CollectiveWorld::Rank self) {
         const auto barrier = [&](const char* tag) {
           self.membership.barrier(tag, {}, world.executor().deadline_in(seconds(60)));
         };
         barrier("test.joined");
         if (self.rank == 0) none.emplace();
         barrier("test.begin");
         const Error error =
             error_of([&] { Group::make(self.runtime, self.membership, {.timeout = seconds(20)}); });
         EXPECT_EQ(error.kind(), ErrorKind::kOverloaded) << error.what();
         EXPECT_THAT(error.what(), AllOf(HasSubstr("limit"), HasSubstr("ulimit -n")));
         EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("containers")));
         barrier("test.end");
         if (self.rank == 0) none.reset();
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
}

/// A group ends with its world: a worker that leaves stops waiting for others, and others stop waiting for
/// it.
TEST_P(CollectiveFailures, OfARankThatLeavesTheWorldAreCancelledAndReportedToTheOthers) {
  const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
  std::atomic<int> told = 0;
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         const Group group = make_group_of_suite(self.runtime, self.membership, options());
         group.all_reduce(at::ones({2})).wait();
         // wait() may return before the other ranks have their results.
         self.membership.barrier("test.leave", {}, in(seconds(60)));
         if (self.rank == 1) {
           const auto pending = group.all_reduce(at::ones({1 << 18}));
           self.membership.leave(in(seconds(60)));
           for (const std::string& text :
                {error_text([&] { pending.wait(); }), error_text([&] { group.barrier(); })}) {
             EXPECT_THAT(text, AllOf(HasSubstr("cancelled"), HasSubstr("has left the world")));
           }
         } else {
           while (self.membership.is_present(1)) world_.executor().sleep(milliseconds(1));
           const std::string text = error_text([&] { group.all_reduce(at::ones({1 << 18})).wait(); });
           EXPECT_THAT(text, AllOf(HasSubstr("disconnected"), HasSubstr("worker1")));
           // The end of a rank that this error has reached is a second cause for the others.
           ++told;
           const Deadline all_told = in(seconds(30));
           while (told < ranks() - 1 && !all_told.passed(world_.executor().now())) {
             world_.executor().sleep(milliseconds(1));
           }
         }
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
}

// peer: c10d testMonitoredBarrier
// peer: c10d `collective_hang`, `testSequenceNumInit`, sequence numbers: same, always on: the error counts
//   the calls of the late rank
TEST_P(CollectiveFailureReports, ReportsToALateRankThatItWasGivenUp) {
  const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         const Group group = make_group_of_suite(self.runtime, self.membership, options());
         group.all_reduce(at::ones({2})).wait();
         const bool late = self.rank == ranks() - 1;
         if (!late) {
           EXPECT_THROW(group.barrier(milliseconds(400)), Error);
         }
         self.membership.barrier("test.late", {}, in(seconds(60)));
         // Between hosts, the announcement may still be on its way, on another connection than this barrier.
         const Deadline announced = in(seconds(30));
         while (!group.backend()->failure() && !announced.passed(world_.executor().now())) {
           world_.executor().sleep(milliseconds(1));
         }
         try {
           group.barrier(seconds(60));
         } catch (...) {
           self.membership.barrier("test.end", {}, in(seconds(60)));
           throw;
         }
       })) {
    ASSERT_TRUE(failure);
    const Error error = to_error(failure);
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("barrier()"), HasSubstr("call 2 of the group"),
                      HasSubstr("worker" + std::to_string(ranks() - 1)), HasSubstr("made 1 calls so far")));
  }
}

TEST_P(CollectiveTimeouts, EndEarlierCallsThatALateRankNeverMakes) {
  for (const bool of_a_part : {false, true}) {
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           const Group whole = make_group_of_suite(self.runtime, self.membership, options());
           const Group group = of_a_part ? whole.split(0, self.rank) : whole;
           group.barrier();
           if (self.rank != ranks() - 1) {
             const std::vector<Future<at::Tensor>> earlier = {group.all_reduce(at::ones({3})),
                                                              group.all_reduce(at::ones({300000}))};
             const auto names_late_rank = HasSubstr("worker" + std::to_string(ranks() - 1));
             const TimePoint called = world_.executor().now();
             EXPECT_THAT(error_text([&] { group.barrier(milliseconds(400)); }), names_late_rank);
             EXPECT_LT(world_.executor().now() - called, seconds(10));
             for (const auto& call : earlier) {
               ASSERT_TRUE(call.wait_for(seconds(20))) << "the limit of the group is minutes";
               EXPECT_THAT(error_text([&] { call.wait(seconds(1)); }), names_late_rank);
             }
           }
           self.membership.barrier("test.end", {}, world_.executor().deadline_in(seconds(60)));
         })) {
      EXPECT_FALSE(failure) << to_error(failure).what();
    }
  }
}

TEST_P(CollectiveTimeouts, AreNotExtendedByACallerThatWaitsForMoments) {
  GroupOptions options = this->options();
  options.timeout = seconds(20);
  world_.make_clocks();
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         const Group group = make_group_of_suite(self.runtime, self.membership, options);
         group.barrier();
         if (self.rank != ranks() - 1) {
           const MovableClock& clock = world_.clock(self.rank);
           const TimePoint called = clock.now();
           const Future<at::Tensor> sum = group.all_reduce(at::ones({3}));
           const Deadline limit = world_.executor().deadline_in(seconds(40));
           while (!sum.wait_for(milliseconds(5)) && !limit.passed(world_.executor().now())) {
             const bool early = clock.now() - called < options.timeout;
             if (early && world_.is_first_here(self.rank)) world_.move_clocks(seconds(3));
           }
           ASSERT_TRUE(sum.done());
           EXPECT_THAT(error_text([&] { sum.wait(); }), HasSubstr("worker" + std::to_string(ranks() - 1)));
         }
         self.membership.barrier("test.end", {}, world_.executor().deadline_in(seconds(60)));
       })) {
    EXPECT_FALSE(failure) << to_error(failure).what();
  }
}

// peer: c10d testBarrier, store_based_barrier: same
// peer: c10d `testMonitoredBarrier`,
//   `monitored_barrier_{gloo,subgroup,allreduce_hang,rank_0_timeout,failure_order,wait_all_ranks}`,
//   Horovod's `stall`: better: every operation names the late ranks, on all ranks
TEST_P(CollectiveAbsences, NamesALateRankAndTheCallItMisses) {
  const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
  GroupOptions options = this->options();
  options.timeout = seconds(30);
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         const Group group = make_group_of_suite(self.runtime, self.membership, options);
         group.all_reduce(at::ones({2})).wait();
         const bool late = self.rank == ranks() - 1;
         try {
           if (!late) group.barrier(milliseconds(400));
         } catch (...) {
           self.membership.barrier("test.end", {}, in(seconds(60)));
           throw;
         }
         self.membership.barrier("test.end", {}, in(seconds(60)));
         if (late) throw std::runtime_error("the late one");
       })) {
    ASSERT_TRUE(failure);
    if (describe(failure).text.find("the late one") != std::string::npos) continue;
    const Error error = to_error(failure);
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("barrier()"), HasSubstr("call 2 of the group"),
                                    HasSubstr("worker" + std::to_string(ranks() - 1))));
  }
}

TEST_P(CollectiveAbsences, ARankThatDestroysItsGroupFailsTheOthers) {
  int failed = 0;
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         std::exception_ptr failure;
         try {
           Group group = make_group_of_suite(self.runtime, self.membership, options());
           group.barrier();
           if (self.rank != 0) group.all_reduce(at::ones({3})).wait();
         } catch (...) {
           failure = std::current_exception();
         }
         // The end of a rank must not be the error that the others see.
         self.membership.barrier("test.end", {}, world_.executor().deadline_in(seconds(60)));
         if (failure) std::rethrow_exception(failure);
       })) {
    if (!failure) continue;
    ++failed;
    const Error error = to_error(failure);
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker0"), HasSubstr("all_reduce(Float [3], sum)")));
  }
  EXPECT_EQ(failed, ranks() - 1);
}

TEST_P(CollectiveDrops, DuringACallSpoilNoResult) {
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         std::optional<Group> group = make_group_of_suite(self.runtime, self.membership, options());
         group->barrier();
         at::Tensor values = group->allocate({1 << 20}, at::kFloat);
         values.fill_(self.rank + 1);
         self.membership.barrier("test.filled", {}, world_.executor().deadline_in(seconds(60)));
         if (self.rank == 0) {
           static_cast<void>(group->all_reduce(values));
           values.reset();
           group.reset();
         } else {
           world_.executor().sleep(milliseconds(200));
           try {
             group->all_reduce(values).wait();
             EXPECT_TRUE(at::equal(values, at::full_like(values, ranks() * (ranks() + 1) / 2)))
                 << "success, with " << values[0].item<float>();
           } catch (const Error& error) {
             EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
             EXPECT_THAT(error.what(), HasSubstr("worker0"));
           }
         }
         self.membership.barrier("test.end", {}, world_.executor().deadline_in(seconds(60)));
       })) {
    EXPECT_FALSE(failure) << to_error(failure).what();
  }
}

TEST_P(CollectiveFailures, RanksThatCreateDifferentGroupsGetAnError) {
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         GroupOptions options = this->options();
         if (self.rank == 1) options.network = Network::kThisHostOnly;  // no row uses it
         make_group_of_suite(self.runtime, self.membership, options);
       })) {
    ASSERT_TRUE(failure);
    EXPECT_THAT(to_error(failure).what(),
                AllOf(HasSubstr("worker0"), HasSubstr("worker1"), HasSubstr("network")));
  }
}

}  // namespace
}  // namespace torchspan::testing::collective_failures
