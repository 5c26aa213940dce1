// How passes end: when backward() returns or throws, and what is left for the next pass.
#include <atomic>

#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_endings {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Throws in its backward.
struct Throw : torch::autograd::Function<Throw> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw std::runtime_error("it threw");
  }
};

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
constexpr Function<multiply> kMultiply{"multiply"};
std::vector<at::Tensor> squares(const at::Tensor& a, const at::Tensor& b) { return {a * a, b * b}; }
constexpr Function<squares> kSquares{"squares"};
std::vector<at::Tensor> doubles(const at::Tensor& a) { return {a * 2, a * 3}; }
constexpr Function<doubles> kDoubles{"doubles"};
at::Tensor slow_and_bad(Worker& worker, const at::Tensor& x) {
  const at::Tensor bad = Throw::apply(x * 2);
  return bad + sleeps_in_backward(x * 3, worker.runtime(), seconds(5));
}
constexpr Function<slow_and_bad> kSlowAndBad{"slow_and_bad"};

at::Tensor slowly(Worker& worker, const at::Tensor& x) {
  return sleeps_in_backward(x, worker.runtime(), seconds(5));
}
constexpr Function<slowly> kSlowly{"slowly"};
/// Its graph takes five seconds to be destroyed, and then sets the flag at that address.
at::Tensor slow_to_destroy(Worker& worker, const at::Tensor& x, std::int64_t destroyed) {
  const std::shared_ptr<void> end(nullptr, [&runtime = worker.runtime(), destroyed](void*) {
    runtime.executor.sleep(seconds(5));
    *reinterpret_cast<std::atomic<bool>*>(destroyed) = true;
  });
  at::Tensor sum = x + x;
  sum.register_hook([end](const at::Tensor& gradient) { return gradient; });
  return sum;
}
constexpr Function<slow_to_destroy> kSlowToDestroy{"slow_to_destroy"};
/// Waits for a pass on the only thread of its worker; returns how many passes run after that failed.
std::int64_t trains_alone(Worker& worker) {
  const at::Tensor a = parameter();
  Context context(worker);
  const at::Tensor loss = worker.rpc_sync(0, kSlowly, a).sum();
  const Error error = error_of([&] { context.backward(loss, {.retain_graph = true}); });
  EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
  EXPECT_THAT(error.message(), AllOf(HasSubstr("raise max_threads"), HasSubstr("on worker 'worker1'")));
  return static_cast<std::int64_t>(counts_of(worker).passes);
}
constexpr Function<trains_alone> kTrainsAlone{"trains_alone"};

ClusterOptions world(int workers) {
  return autograd_world(workers, FunctionTable()
                                     .add(kMultiply, kSquares, kDoubles, kSlowAndBad)
                                     .add(kSlowly, kTrainsAlone, kSlowToDestroy));
}

/// The pool fails the wait of backward() when all its threads wait and another call needs one.
TEST(AutogradEndings, APassWhoseWaitIsGivenUpEndsEverywhere) {
  ClusterOptions options = world(2);
  options.adjust = [](int rank, WorkerPlan& plan) {
    if (rank == 1) plan.service.threads = plan.service.max_threads = 1;
  };
  on_first(options, [](Worker& worker) {
    const auto left = worker.rpc_async("worker1", kTrainsAlone);
    nap(worker, seconds(1));
    const at::Tensor a = parameter();
    const auto other = worker.rpc_async("worker1", kMultiply, a, a);
    EXPECT_EQ(left.wait(), 0) << "passes that run on worker 1";
    nap(worker, milliseconds(10));
    EXPECT_EQ(counts_of(worker).passes, 0u) << "here";
    other.wait();
  });
}

TEST(AutogradEndings, BackwardReturnsAfterTheCallbacksOfItsEnd) {
  on_first(world(2), [](Worker& worker) {
    for (const bool remote_last : {true, false}) {
      const at::Tensor a = parameter(), b = parameter();
      bool called = false;
      const auto node = torch::autograd::impl::grad_accumulator(b);
      node->add_post_hook(std::make_unique<AfterPass>(b, [&] {
        nap(worker, seconds(1));
        called = true;
      }));
      Context context(worker);
      const at::Tensor far = worker.rpc_sync("worker1", kMultiply, a, a);
      context.backward(remote_last ? (far * b).sum() : (worker.rpc_sync("worker1", kMultiply, b, b)).sum());
      EXPECT_TRUE(called);
    }
  });
}

/// The thread that receives the last reply serves other calls too.
TEST(AutogradEndings, CallbacksOfItsEndBlockNoOtherWorker) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter(), b = parameter();
    const auto node = torch::autograd::impl::grad_accumulator(b);
    node->add_post_hook(std::make_unique<AfterPass>(b, [&] { nap(worker, seconds(1)); }));
    Context context(worker);
    const at::Tensor loss = (worker.rpc_sync("worker1", kMultiply, a, a) * b).sum();
    Duration longest{0};
    std::atomic<bool> over = false;
    Thread caller = worker.runtime().executor.spawn("caller", [&] {
      while (!over) {
        const TimePoint begin = now(worker);
        worker.rpc_sync("worker1", kMultiply, b.detach(), b.detach());
        longest = std::max<Duration>(longest, now(worker) - begin);
        nap(worker, milliseconds(10));
      }
    });
    context.backward(loss);
    over = true;
    caller.join();
    EXPECT_LT(longest, milliseconds(500));
  });
}

TEST(AutogradEndings, AFailureBesideASlowBranchIsReportedAtOnce) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kSlowAndBad, a).sum();
    const TimePoint begin = now(worker);
    const Error error = error_of([&] { context.backward(loss, {.threads = 2}); });
    EXPECT_THAT(error.message(), AllOf(HasSubstr("it threw"), HasSubstr("'slow_and_bad'")));
    EXPECT_LT(now(worker) - begin, seconds(1));
    nap(worker, seconds(10));
    EXPECT_EQ(counts_of(worker).passes, 0u);
  });
}

/// As in one process: the part of the graph that the first loss did not use remains for the second.
TEST(AutogradEndings, TwoLossesOverDifferentResultsOfOneCall) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter(), b = parameter();
    Context context(worker);
    const auto parts = worker.rpc_sync("worker1", kSquares, a, b);
    context.backward(parts[0].sum());
    expect_equal(context.gradient(a), a.detach() * 2);
    EXPECT_FALSE(context.gradient(b).defined());
    context.backward(parts[1].sum());
    expect_equal(context.gradient(b), b.detach() * 2);
    const Error error = error_of([&] { context.backward(parts[1].sum()); });
    EXPECT_THAT(error.message(), AllOf(HasSubstr("the result of 'squares'"), HasSubstr("second time"),
                                       HasSubstr("autograd_endings.cpp:")));
  });
}

/// As in one process: these graphs saved nothing, so nothing was freed.
TEST(AutogradEndings, AGraphThatSavesNothingRunsTwice) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", "aten::add.Tensor", {a, a}).toTensor().sum();
    context.backward(loss);
    context.backward(loss);
    expect_equal(context.gradient(a), at::full({2}, 4.0, at::kDouble));
    const auto parts = worker.rpc_sync("worker1", kDoubles, a);  // the arguments are used twice
    context.backward(parts[0].sum());
    context.backward(parts[1].sum());
    expect_equal(context.gradient(a), at::full({2}, 9.0, at::kDouble));
  });
}

TEST(AutogradEndings, ALongContextKeepsLittleOfWhatItUsed) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    at::Tensor first;
    for (int i = 0; i < 200; ++i) {
      const at::Tensor loss = worker.rpc_sync("worker1", "aten::add.Tensor", {a, a}).toTensor().sum();
      if (i == 0) first = loss;
      context.backward(loss);
    }
    expect_equal(context.gradient(a), at::full({2}, 400.0, at::kDouble));
    for (const auto& part : context.graph().workers) EXPECT_EQ(part.parts.size(), 64u) << part.worker;
    const Error error = error_of([&] { context.backward(first); });
    EXPECT_THAT(error.message(), AllOf(HasSubstr("the result of 'aten::add.Tensor'"), HasSubstr("used up"),
                                       HasSubstr("retain_graph")));
  });
}

/// The thread that receives the last reply of a part ends it, and with it the oldest used graph.
TEST(AutogradEndings, AGraphThatIsSlowToDestroyBlocksNoWorker) {
  std::atomic<bool> destroyed = false;
  on_first(world(2), [&destroyed](Worker& worker) {
    destroyed = false;
    const at::Tensor a = parameter();
    Context context(worker);
    const auto address = reinterpret_cast<std::int64_t>(&destroyed);
    context.backward(worker.rpc_sync("worker1", kSlowToDestroy, a, address).sum());
    const TimePoint begin = now(worker);
    for (int i = 0; i < 64; ++i) context.backward(worker.rpc_sync("worker1", kMultiply, a, a).sum());
    worker.rpc_sync("worker1", kMultiply, a.detach(), a.detach());
    EXPECT_LT(now(worker) - begin, seconds(4));
    nap(worker, seconds(10));
    EXPECT_TRUE(destroyed) << "nothing was tested";
  });
}

TEST(AutogradEndings, TheTimeLimitIncludesTheRootsOwnPart) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor far = worker.rpc_sync("worker1", kSlowly, a);
    const at::Tensor loss = sleeps_in_backward(far, worker.runtime(), seconds(5)).sum();
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kTimedOut, "BackwardOptions::timeout",
                 [&] { context.backward(loss, {.timeout = seconds(7)}); });
    EXPECT_LT(now(worker) - begin, seconds(9));
    nap(worker, seconds(10));
  });
}

TEST(AutogradEndings, APassThatIsOverWhenItsLimitIsCheckedSucceeds) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    context.backward(sleeps_in_backward(a, worker.runtime(), seconds(5)).sum(), {.timeout = seconds(1)});
    expect_equal(context.gradient(a), at::ones_like(a));
  });
}

TEST(AutogradEndings, AGraphThatWasUsedUpIsNamed) {
  on_first(world(2), [](Worker& worker) {
    for (const PassMode mode : {PassMode::kSmart, PassMode::kFast}) {
      const at::Tensor a = parameter();
      Context context(worker);
      const at::Tensor there = worker.rpc_sync("worker1", kMultiply, a, a);
      context.backward(there.sum(), {.mode = mode});
      const Error error = error_of([&] { context.backward((there * 2).sum(), {.mode = mode}); });
      EXPECT_THAT(error.message(),
                  AllOf(HasSubstr("the result of 'multiply'"),
                        mode == PassMode::kFast ? HasSubstr("retain_graph") : HasSubstr("second time"),
                        HasSubstr("autograd_endings.cpp:")));
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_EQ(error.worker(), "worker1");
    }
  });
}

}  // namespace
}  // namespace torchspan::autograd_endings
