#include "collective/channels/inbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/api/sim_executor.h"
#include "tests/support/errors.h"

namespace torchspan::collective::channels::inbox_test {
namespace {

using std::chrono::seconds;
using testing::error_of;
using ::testing::HasSubstr;

const Error kFirst(ErrorKind::kDisconnected, "worker1 is gone");
const Error kSecond(ErrorKind::kTimedOut, "worker2 is late");

/// Runs `body` with the inbox of rank 0 of three.
void with_inbox(const std::function<void(Executor&, Inbox&)>& body) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SimExecutor executor(seed);
    executor.run([&] {
      Inbox inbox(executor, {"worker0", "worker1", "worker2"}, 0);
      body(executor, inbox);
    });
  }
}

TEST(Inbox, ACallBeforeAFailureWaitsForItsParts) {
  with_inbox([](Executor& executor, Inbox& inbox) {
    inbox.begin(3);
    EXPECT_TRUE(inbox.fail(kFirst, /*from_call=*/4));
    const Thread peer = executor.spawn("peer", [&] {
      executor.sleep(seconds(1));
      inbox.put({1, 1, 0}, 3, Buffer());
    });
    inbox.take({1, 1, 0}, 0, executor.deadline_in(seconds(60)));
    EXPECT_LT(executor.now(), TimePoint(seconds(2)));
    inbox.begin(4);
    EXPECT_THAT(error_of([&] {
                  inbox.take({1, 2, 0}, 0, Deadline::never());
                }).what(),
                HasSubstr("worker1 is gone"));
  });
}

TEST(Inbox, ASecondFailureThatConcernsTheCallEndsItsWait) {
  with_inbox([](Executor& executor, Inbox& inbox) {
    inbox.begin(3);
    inbox.fail(kFirst, /*from_call=*/4);
    const Thread peer = executor.spawn("peer", [&] {
      executor.sleep(seconds(1));
      EXPECT_FALSE(inbox.fail(kSecond, /*from_call=*/5)) << "of later calls than the first";
      EXPECT_TRUE(inbox.fail(kSecond, /*from_call=*/0)) << "other ranks do not know it yet";
      EXPECT_FALSE(inbox.fail(kSecond, /*from_call=*/0));
    });
    const Error error = error_of([&] { inbox.take({1, 1, 0}, 0, executor.deadline_in(seconds(60))); });
    EXPECT_LT(executor.now(), TimePoint(seconds(2)));
    EXPECT_THAT(error.what(), HasSubstr("worker1 is gone")) << "the first failure is the group's";
  });
}

TEST(Inbox, GivesPartsThatArrivedBeforeTheFailure) {
  with_inbox([](Executor&, Inbox& inbox) {
    inbox.begin(1);
    inbox.put({1, 1, 0}, 1, Buffer());
    inbox.fail(kFirst, /*from_call=*/0);
    inbox.put({2, 1, 0}, 1, Buffer());  // over another lane
    for (const int rank : {1, 2}) EXPECT_NO_THROW(inbox.take({rank, 1, 0}, 0, Deadline::never()));
    EXPECT_THAT(error_of([&] {
                  inbox.take({1, 1, 1}, 0, Deadline::never());
                }).what(),
                HasSubstr("worker1 is gone"));
  });
}

}  // namespace
}  // namespace torchspan::collective::channels::inbox_test
