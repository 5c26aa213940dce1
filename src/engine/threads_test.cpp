// Branches of one pass on several threads at once.
#include <atomic>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/pool.h>

#include "engine/oracle.h"
#include "engine/test_nodes.h"

namespace torchspan::engine::threads_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Identity whose backward calls the function that its forward got.
struct Calls : torch::autograd::Function<Calls> {
  static Tensor forward(AutogradContext* context, const Tensor& x, std::function<void()>* call) {
    context->saved_data["call"] = reinterpret_cast<std::int64_t>(call);
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data.at("call").toInt()))();
    return {gradients[0], Tensor()};
  }
};

class EngineThreads : public ::testing::Test {
 protected:
  ~EngineThreads() override { pool_->stop(); }

  PassOptions options(unsigned threads) {
    PassOptions options;
    options.threads = threads;
    options.enlist = [this](UniqueFunction<void()> job) { pool_->post(std::move(job)); };
    return options;
  }
  /// Runs a pass from `roots` to its end.
  void run(const std::vector<Tensor>& roots, GradientSink& sink, PassOptions options) {
    const auto pass = std::make_shared<GraphPass>(sink, std::move(options));
    Promise<void> ended(pool_);
    sink.after_pass(
        [&](const PassStatus& status) { status.ok() ? ended.set_value() : ended.set_error(status.error); });
    for (const Tensor& root : roots) pass->add_root(root);
    pass->prepare();
    pass->run();
    const Future<void> future = ended.future();
    future.wait();
  }
  /// Returns whether the other thread also arrives within ten seconds.
  bool meet(std::atomic<int>& arrived, int expected) {
    ++arrived;
    const Deadline deadline = executor_->deadline_in(std::chrono::seconds(10));
    while (arrived < expected && !deadline.passed(executor_->now())) {
      executor_->sleep(std::chrono::microseconds(100));
    }
    return arrived >= expected;
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>(*executor_, PoolOptions{.threads = 4});
};

TEST_F(EngineThreads, RunBranchesThatDoNotDependOnEachOtherAtOnce) {
  const Tensor x = at::ones({2}).requires_grad_();
  std::atomic<int> arrived{0};
  std::atomic<int> met{0};
  std::function<void()> wait = [&] { met += meet(arrived, 3) ? 1 : 0; };
  Tensor loss = at::zeros({});
  for (int i = 1; i <= 3; ++i) loss = loss + Calls::apply(x * i, &wait).sum();
  GradientMap gradients;
  MapSink sink(gradients);
  run({loss}, sink, options(3));
  EXPECT_EQ(met, 3) << "each waited for the two others";
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 6.0)));
}

TEST_F(EngineThreads, AreNoMoreThanAllowed) {
  const Tensor x = at::ones({2}).requires_grad_();
  std::atomic<int> now{0}, most{0};
  std::function<void()> count = [&] {
    const int here = ++now;
    int seen = most;
    while (here > seen && !most.compare_exchange_weak(seen, here)) {
    }
    executor_->sleep(std::chrono::milliseconds(1));
    --now;
  };
  Tensor loss = at::zeros({});
  for (int i = 1; i <= 20; ++i) loss = loss + Calls::apply(x * i, &count).sum();
  GradientMap gradients;
  MapSink sink(gradients);
  run({loss}, sink, options(2));
  EXPECT_LE(most, 2);
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 210.0)));
}

/// Checks that only one thread at a time accumulates gradients.
class CarefulSink final : public GradientSink {
 public:
  CarefulSink(GradientMap& gradients, Executor& executor)
      : GradientSink(1), gradients_(gradients), executor_(executor) {}
  Tensor gradient(const Tensor& parameter) const override { return gradients_.gradient(parameter); }
  void accumulate(const Tensor& parameter, Tensor gradient) override {
    EXPECT_EQ(++inside_, 1);
    executor_.sleep(std::chrono::microseconds(200));
    gradients_.accumulate(parameter, std::move(gradient));
    --inside_;
  }
  void replace(const Tensor& parameter, Tensor gradient) override {
    gradients_.replace(parameter, std::move(gradient));
  }

 private:
  GradientMap& gradients_;
  Executor& executor_;
  std::atomic<int> inside_{0};
};

TEST_F(EngineThreads, ServeLeavesOneAfterTheOther) {
  std::vector<Tensor> leaves;
  Tensor loss = at::zeros({});
  for (int i = 0; i < 50; ++i) {
    leaves.push_back(at::full({2}, static_cast<double>(i)).requires_grad_());
    loss = loss + leaves.back().sin().sum();
  }
  GradientMap gradients;
  CarefulSink sink(gradients, *executor_);
  run({loss}, sink, options(4));
  for (const Tensor& leaf : leaves) EXPECT_TRUE(at::equal(gradients.gradient(leaf), leaf.detach().cos()));
}

TEST_F(EngineThreads, EndWithTheFirstFailureWhenAllHaveStopped) {
  const Tensor x = at::ones({2}).requires_grad_();
  std::atomic<int> arrived{0}, running{0}, running_when_told{-1};
  std::function<void()> slow = [&] {
    ++running;
    meet(arrived, 2);
    const Deadline limit = executor_->deadline_in(std::chrono::seconds(10));
    while (running_when_told < 0 && !limit.passed(executor_->now()))
      executor_->sleep(std::chrono::microseconds(100));
    --running;
  };
  std::function<void()> bad = [&] {
    meet(arrived, 2);
    throw std::runtime_error("a branch broke");
  };
  const Tensor loss = Calls::apply(x * 2, &slow).sum() + Calls::apply(x * 3, &bad).sum();
  GradientMap gradients;
  MapSink sink(gradients);
  PassOptions two = options(2);
  two.failed = [&] { running_when_told = running.load(); };
  try {
    run({loss}, sink, std::move(two));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("a branch broke"));
    EXPECT_EQ(running, 0) << "the end came while a node ran";
    EXPECT_EQ(running_when_told, 1) << "it was called when the other branch had ended, or not at all";
  }
}

TEST_F(EngineThreads, ThatStartTooLateDoNothing) {
  const Tensor x = at::ones({2}).requires_grad_();
  std::vector<UniqueFunction<void()>> late;
  PassOptions options;
  options.threads = 3;
  options.enlist = [&](UniqueFunction<void()> job) { late.push_back(std::move(job)); };
  GradientMap gradients;
  MapSink sink(gradients);
  run({(x * 2).sum() + (x * 3).sum()}, sink, std::move(options));
  EXPECT_FALSE(late.empty());
  for (auto& job : late) job();
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 5.0)));
}

TEST_F(EngineThreads, AreRefusedWhereTheyCannotBe) {
  GradientMap gradients;
  MapSink sink(gradients);
  EXPECT_THROW(GraphPass(sink, options(0)), Error);
  PassOptions alone;
  alone.threads = 2;
  EXPECT_THROW(GraphPass(sink, alone), Error);
  const Tensor x = at::ones({}).requires_grad_();
  EXPECT_THROW(backward({x * 2}, {}, sink, options(2)), Error);
}

}  // namespace
}  // namespace torchspan::engine::threads_test
