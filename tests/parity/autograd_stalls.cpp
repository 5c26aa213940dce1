// What the root learns about a pass that does not end: which workers wait for what, compute, or do not
// answer.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_stalls {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
constexpr Function<multiply> kMultiply{"multiply"};
at::Tensor own_tensor() { return parameter() * 2; }
constexpr Function<own_tensor> kOwnTensor{"own_tensor"};
void work(Worker& worker, std::int64_t time) { worker.runtime().executor.sleep(seconds(time)); }
constexpr Function<work> kWork{"work"};
at::Tensor slowly(Worker& worker, const at::Tensor& x, std::int64_t time) {
  return sleeps_in_backward(x, worker.runtime(), seconds(time));
}
constexpr Function<slowly> kSlowly{"slowly"};
at::Tensor slowly_on_2(Worker& worker, const at::Tensor& x, std::int64_t time) {
  return worker.rpc_sync(2, kSlowly, x, time) * x;
}
constexpr Function<slowly_on_2> kSlowlyOn2{"slowly_on_2"};

/// Its backward first sends a gradient to worker 0, and then computes for a long time.
at::Tensor sends_then_works(Worker& worker, const at::Tensor& x, std::int64_t time) {
  const auto in_a_fresh_thread = [&](const std::function<void()>& act) {  // sequence numbers restart there
    worker.runtime().executor.spawn("nodes", act).join();
  };
  at::Tensor first, slow;
  in_a_fresh_thread([&] {
    Context numbers(worker);
    for (int i = 0; i < 50; ++i) worker.rpc_sync(0, kOwnTensor);
  });
  first = worker.rpc_sync(0, kOwnTensor);
  in_a_fresh_thread([&] { slow = sleeps_in_backward(first + x, worker.runtime(), seconds(time)); });
  return slow + worker.rpc_sync(0, kOwnTensor);
}
constexpr Function<sends_then_works> kSendsThenWorks{"sends_then_works"};

at::Tensor fails(const at::Tensor&) { throw std::runtime_error("no such thing"); }
constexpr Function<fails> kFails{"fails"};
at::Tensor late(Worker& worker, const at::Tensor& x) {
  worker.runtime().executor.sleep(seconds(1));
  return x * 2;
}
constexpr Function<late> kLate{"late"};

ClusterOptions world(int workers) {
  return autograd_world(workers, FunctionTable()
                                     .add(kMultiply, kOwnTensor, kWork, kSlowly, kSlowlyOn2)
                                     .add(kSendsThenWorks, kFails, kLate));
}

/// Their tensors must not be reported as unused: the program used them, and cannot detach them.
TEST(AutogradStalls, ACallThatFailedOrCameLateAndWasRepeatedIsNamedAsThat) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter();
    const auto fail = [&] { worker.rpc_sync("worker1", kFails, a); };
    const auto be_late = [&] { worker.with({.timeout = milliseconds(500)}).rpc_sync("worker1", kLate, a); };
    for (const std::function<void()>& attempt :
         {std::function<void()>(fail), std::function<void()>(be_late)}) {
      Context context(worker);
      EXPECT_THROW(attempt(), Error);
      nap(worker, seconds(2));
      const at::Tensor loss = worker.rpc_sync("worker1", kMultiply, a, a).sum();
      const Error error =
          error_of([&] { context.backward(loss, {.retain_graph = true, .mode = PassMode::kFast}); });
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
      EXPECT_THAT(error.message(),
                  AllOf(HasSubstr("got no result of that call"), HasSubstr("new autograd::Context"),
                        HasSubstr("kSmart"), Not(HasSubstr("detach")), Not(HasSubstr("'multiply'"))));
      context.clear_gradients();
      context.backward(loss);
      expect_equal(context.gradient(a), a.detach() * 2);
    }
  });
}

/// Worker 1 has no gradients to send, so its part is over while the others still wait.
TEST(AutogradStalls, IsNoticedWhenAPartHasEnded) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    worker.rpc_sync("worker2", kMultiply, a, a);  // takes no part
    const at::Tensor loss = worker.rpc_sync("worker1", kOwnTensor).sum();
    const TimePoint begin = now(worker);
    const Error error = error_of([&] { context.backward(loss, {.mode = PassMode::kFast}); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.message(),
                AllOf(HasSubstr("'multiply'"), HasSubstr("kSmart"), Not(HasSubstr("'own_tensor'"))));
    EXPECT_LT(now(worker) - begin, seconds(6));
  });
}

TEST(AutogradStalls, NamesNoSendThatGotItsGradients) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    worker.rpc_sync("worker2", kMultiply, a, a);
    const at::Tensor loss = worker.rpc_sync("worker1", kSlowly, a, 0).sum();
    const Error error =
        error_of([&] { context.backward(loss, {.retain_graph = true, .mode = PassMode::kFast}); });
    EXPECT_THAT(error.message(), AllOf(HasSubstr("'multiply'"), Not(HasSubstr("'slowly'"))));
  });
}

/// One thread of worker 2 works for the pass, the other for another call: no thread is left to answer.
TEST(AutogradStalls, WorkIsNoStallWhenNoThreadIsLeftToAnswer) {
  ClusterOptions options = world(3);
  options.threads = 2;
  on_first(options, [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker2", kSendsThenWorks, a, 20).sum();
    const Thread other =
        worker.runtime().executor.spawn("other", [&] { worker.rpc_sync("worker2", kWork, 20); });
    nap(worker, milliseconds(10));
    const TimePoint begin = now(worker);
    context.backward(loss, {.mode = PassMode::kFast});
    EXPECT_GE(now(worker) - begin, seconds(20)) << "nothing was tested";
    EXPECT_TRUE(context.gradient(a).defined());
  });
}

/// Waits until all messages of the pass that the others know of have arrived.
TEST(AutogradStalls, SilenceIsNoStall) {
  SimCluster cluster(world(3));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker2", kSendsThenWorks, a, 20).sum();
    const Thread silence = worker.runtime().executor.spawn("silence", [&] {
      nap(worker, seconds(1));
      cluster.network().cut("worker0", "worker2");
      nap(worker, seconds(10));
      cluster.network().heal("worker0", "worker2");
    });
    const TimePoint begin = now(worker);
    context.backward(loss, {.mode = PassMode::kFast, .stall = seconds(1)});
    EXPECT_GE(now(worker) - begin, seconds(20)) << "nothing was tested";
    EXPECT_TRUE(context.gradient(a).defined());
  });
}

TEST(AutogradStalls, ALatePassEndsSoonThoughNoThreadIsLeftToAnswer) {
  ClusterOptions options = world(3);
  options.threads = 1;
  on_first(options, [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kSlowlyOn2, a, 20).sum();
    const TimePoint begin = now(worker);
    const Error error = error_of([&] { context.backward(loss, {.timeout = seconds(1)}); });
    EXPECT_THAT(error.message(), AllOf(HasSubstr("worker 'worker1' sent"), HasSubstr("'slowly'")));
    EXPECT_LT(now(worker) - begin, milliseconds(1500));
    nap(worker, seconds(25));
  });
}

/// No message of worker 2 arrives any more, and its connections do not break.
TEST(AutogradStalls, NamesAWorkerThatDoesNotAnswer) {
  ClusterOptions options = world(3);
  options.graceful = false;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, seconds(60));
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kSlowlyOn2, a, 0).sum();
    cluster.network().cut("worker0", "worker2");
    cluster.network().cut("worker1", "worker2");
    const TimePoint begin = now(worker);
    const Error error = error_of([&] { context.backward(loss, {.timeout = seconds(1)}); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.message(), AllOf(HasSubstr("worker 'worker2' does not answer"),
                                       HasSubstr("worker 'worker1' sent arguments of 'slowly'")));
    EXPECT_LT(now(worker) - begin, milliseconds(3500));
  });
}

}  // namespace
}  // namespace torchspan::autograd_stalls
