#include "pipeline/messages/event_queue.h"

#include <gtest/gtest.h>
#include <limits>
#include <memory>

namespace torchspan::pipeline::event_queue_test {
namespace {

using std::chrono::milliseconds;

/// An executor on which an event may arrive at the end of a wait.
class LateExecutor final : public ContinuationExecutor {
 public:
  Executor& executor() override { return *executor_; }
  void post(UniqueFunction<void()> job) override { job(); }
  void wait(Parker&, const std::atomic<bool>&, Deadline) override {
    if (arrives_late) event_queue.lock()->put(Departure{});
  }

  bool arrives_late = false;
  std::weak_ptr<EventQueue> event_queue;

 private:
  const std::unique_ptr<Executor> executor_ = make_executor();
};

class EventQueues : public ::testing::Test {
 protected:
  EventQueues() { continuations_->event_queue = queue_; }

  const std::shared_ptr<LateExecutor> continuations_ = std::make_shared<LateExecutor>();
  const std::shared_ptr<EventQueue> queue_ = std::make_shared<EventQueue>("pipeline", continuations_);
};

TEST_F(EventQueues, AWaitWithoutEventsEndsAtItsLimit) {
  EXPECT_FALSE(queue_->wait(milliseconds(1)));
  EXPECT_TRUE(queue_->take(0).empty());
}

TEST_F(EventQueues, AWaitReturnsAtOnceIfAnEventHasArrived) {
  queue_->put(Departure{});
  EXPECT_TRUE(queue_->wait(milliseconds(1)));
  EXPECT_EQ(queue_->take(0).size(), 1u);
  EXPECT_FALSE(queue_->wait(milliseconds(1)));
}

/// Steps used to end with the error of the wait, if a worker was declared dead at this moment.
TEST_F(EventQueues, AnEventThatArrivesWhileAWaitEndsIsAnEvent) {
  continuations_->arrives_late = true;
  EXPECT_TRUE(queue_->wait(milliseconds(1)));
  EXPECT_EQ(queue_->take(0).size(), 1u);
}

TEST_F(EventQueues, ValuesThatAreNotOfferedAreRefused) {
  queue_->offer({at::ones({2}), at::Tensor()});
  EXPECT_EQ(queue_->offered({0}).at(0).numel(), 2);
  for (const std::int32_t index : {-1, 1, 2, std::numeric_limits<std::int32_t>::max()}) {
    SCOPED_TRACE(index);
    EXPECT_THROW(queue_->offered({0, index}), Error);
  }
}

TEST_F(EventQueues, AWaitFailsIfItsWorkerIsGone) {
  EventQueue orphan("pipeline", {});
  try {
    orphan.wait(milliseconds(1));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
  }
}

}  // namespace
}  // namespace torchspan::pipeline::event_queue_test
