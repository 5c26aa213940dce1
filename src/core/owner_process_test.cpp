#include <array>
#include <functional>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/core/pool.h>

namespace torchspan::owner_process_test {
namespace {

/// Runs `body` in a forked child; returns whether it returned true there.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Whether `body` throws the error of a fork.
bool refuses(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kInvalid && error.message().find("is a fork of") != std::string::npos;
  }
  return false;
}

struct Counted {
  explicit Counted(int& ends) : ends(ends) {}
  ~Counted() { ++ends; }
  int& ends;
};

TEST(OwnerProcess, IsNotCurrentInAChildAndItsChildren) {
  const OwnerProcess process;
  EXPECT_TRUE(process.is_current());
  EXPECT_TRUE(in_child([&] {
    const OwnerProcess own;
    return !process.is_current() && own.is_current() && refuses([&] { process.check("worker3"); }) &&
           in_child([&] { return !process.is_current() && !own.is_current(); });
  }));
  EXPECT_TRUE(process.is_current());
}

TEST(OwnerProcess, DeletesObjectsOnlyWhereTheyWereMade) {
  int ends = 0;
  ProcessOwned<Counted> one = std::make_unique<Counted>(ends);
  std::shared_ptr<Counted> shared = make_process_shared<Counted>(ends);
  std::shared_ptr<Counted> kept = kept_in_forks(std::make_shared<Counted>(ends));
  const auto drop = [&] {
    one.reset();
    shared.reset();
    kept.reset();
    return ends == 0;
  };
  EXPECT_TRUE(in_child(drop));
  EXPECT_EQ(ends, 0);
  EXPECT_FALSE(drop());
  EXPECT_EQ(ends, 3);
}

TEST(OwnerProcess, WaitsOfAParentFailAtOnceInAChild) {
  const auto executor = make_executor();
  const auto pool = std::make_shared<Pool>(*executor, PoolOptions{});
  const auto parker = executor->make_parker();
  const auto poller = executor->make_poller();
  auto promise = std::make_unique<Promise<int>>(pool);
  const Future<int> future = promise->future();
  bool ran = false;
  Thread thread = executor->spawn("idle", [&] { parker->park(Deadline::never()); });
  EXPECT_TRUE(in_child([&] {
    std::array<Poller::Event, 1> events;
    pool->post([&] { ran = true; });
    pool->stop();
    thread.join();
    promise.reset();
    return !ran && !future.done() && refuses([&] { future.wait(); }) &&
           refuses([&] { parker->park(Deadline::never()); }) &&
           refuses([&] { poller->wait(events, Deadline::never()); }) &&
           refuses([&] { future.add_done_callback([](const auto&) {}); }) &&
           refuses([&] { executor->spawn("more", [] {}); });
  }));
  parker->unpark();
  thread.join();
  promise->set_value(3);
  EXPECT_EQ(future.wait(), 3);
  pool->stop();
}

TEST(OwnerProcess, AChildMayUseAnExecutorThatItMade) {
  const auto parents = make_executor();
  EXPECT_TRUE(in_child([] {
    const auto executor = make_executor();
    const auto pool = std::make_shared<Pool>(*executor, PoolOptions{});
    Promise<int> promise(pool);
    const Future<int> next = promise.future().then([](Future<int> value) { return value.wait() + 1; });
    promise.set_value(1);
    const bool right = next.wait() == 2;
    pool->stop();
    return right;
  }));
}

}  // namespace
}  // namespace torchspan::owner_process_test
