// What extensions use of a worker's backend.
#include <gtest/gtest.h>
#include <unistd.h>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::worker_backend_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ClusterOptions;
using testing::SimCluster;
using torchspan::testing::kind_of;

constexpr wire::MessageType kServed{0x8101};    ///< on the pool; then receives there
constexpr wire::MessageType kReceived{0x8102};  ///< where it is received
constexpr wire::MessageType kSlow{0x8103};      ///< on the pool, for a second

/// What the handlers of one test saw.
struct Seen {
  Mutex mutex;  ///< guards the threads on which handlers ran
  std::vector<pid_t> served, received;

  pid_t last(const std::vector<pid_t>& of) {
    const MutexLock lock(mutex);
    return of.empty() ? -1 : of.back();
  }
  std::size_t count(const std::vector<pid_t>& of) {
    const MutexLock lock(mutex);
    return of.size();
  }
};

class Handlers final : public rpc::Extension {
 public:
  explicit Handlers(Seen& seen) : seen_(seen) {}
  void attach(rpc::Registrar& registrar) override {
    using Reply = std::shared_ptr<rpc::Completion>;
    const auto note = [this](std::vector<pid_t>& where) {
      const MutexLock lock(seen_.mutex);
      where.push_back(gettid());
    };
    const auto answer = [](const Reply& reply) {
      wire::Payload nothing;
      reply->succeed(nothing);
    };
    registrar.handle_raw(kServed, "served", rpc::RunOn::kPool,
                         [=, this, backend = registrar.worker().backend().get()](
                             const rpc::CallInfo&, wire::Payload&, const Reply& reply) {
                           note(seen_.served);
                           answer(reply);
                           backend->receive_here();
                         });
    registrar.handle_raw(kReceived, "received", rpc::RunOn::kReceiver,
                         [=, this](const rpc::CallInfo&, wire::Payload&, const Reply& reply) {
                           note(seen_.received);
                           answer(reply);
                         });
    registrar.handle_raw(
        kSlow, "slow", rpc::RunOn::kPool,
        [=, &runtime = registrar.runtime()](const rpc::CallInfo&, wire::Payload&, const Reply& reply) {
          runtime.executor.sleep(seconds(1));
          answer(reply);
        });
  }

 private:
  Seen& seen_;
};

Future<void> send(Worker& worker, wire::MessageType type, Duration timeout = seconds(60),
                  bool served_late = false) {
  rpc::WorkerBackend& backend = *worker.backend();
  rpc::Request request;
  request.type = type;
  request.name = "test";
  request.deadline = worker.runtime().executor.deadline_in(timeout);
  request.served_late = served_late;
  auto completion = std::make_shared<rpc::PromiseCompletion<void>>(backend.continuations());
  Future<void> done = completion->future();
  backend.send(1, std::move(request), std::move(completion));
  return done;
}

/// Runs `body` on worker 0; worker 1 has the handlers.
void on_first(ClusterOptions options, Seen& seen, const std::function<void(Worker&)>& body) {
  options.extensions = [&seen] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<Handlers>(seen));
    return extensions;
  };
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}

TEST(WorkerBackend, AThreadThatReceivesHereTakesTheNextMessagesUntilNoneComes) {
  Seen seen;
  on_first({.spin = milliseconds(20)}, seen, [&](Worker& worker) {
    send(worker, kReceived).wait();
    const pid_t receiver = seen.last(seen.received);
    send(worker, kServed).wait();
    const pid_t pool = seen.last(seen.served);
    EXPECT_NE(pool, receiver);
    for (int i = 0; i < 3; ++i) {
      send(worker, kReceived).wait();
      EXPECT_EQ(seen.last(seen.received), pool);
      send(worker, kServed).wait();
      EXPECT_EQ(seen.last(seen.served), pool) << "without waking another thread of the pool";
    }
    worker.runtime().executor.sleep(seconds(1));
    send(worker, kReceived).wait();
    EXPECT_EQ(seen.last(seen.received), receiver) << "no message had come for the limit";
  });
}

TEST(WorkerBackend, OtherThreadsDoNotReceiveHere) {
  Seen seen;
  on_first({.spin = milliseconds(20)}, seen, [&](Worker& worker) {
    const TimePoint before = worker.runtime().executor.now();
    worker.backend()->receive_here();
    EXPECT_EQ(worker.runtime().executor.now(), before);
  });
}

TEST(WorkerBackend, ServesARequestAfterItsDeadlineOnlyIfItIsServedLate) {
  Seen seen;
  on_first({.threads = 1}, seen, [&](Worker& worker) {
    const Future<void> busy = send(worker, kSlow);
    const Future<void> dropped = send(worker, kServed, milliseconds(100));
    EXPECT_EQ(kind_of([&] { dropped.wait(); }), ErrorKind::kTimedOut);
    busy.wait();
    worker.runtime().executor.sleep(seconds(1));
    EXPECT_EQ(seen.count(seen.served), 0U);

    const Future<void> busy_again = send(worker, kSlow);
    const Future<void> late = send(worker, kServed, milliseconds(100), /*served_late=*/true);
    EXPECT_EQ(kind_of([&] { late.wait(); }), ErrorKind::kTimedOut) << "the caller's deadline stays";
    busy_again.wait();
    worker.runtime().executor.sleep(seconds(1));
    EXPECT_EQ(seen.count(seen.served), 1U);
  });
}

}  // namespace
}  // namespace torchspan::worker_backend_test
