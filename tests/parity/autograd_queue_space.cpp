// Messages of a pass that find a queue full, on the sender's connection or at the receiver: they are sent
// again when the queue has room.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_queue_space {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;

constexpr std::int64_t kWide = 2000;  // 16 KB

at::Tensor wide() { return at::arange(kWide, at::kDouble).div(kWide).set_requires_grad(true); }
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
constexpr Function<multiply> kMultiply{"multiply"};
at::Tensor there_and_back(Worker& worker, const at::Tensor& a, const at::Tensor& b) {
  return worker.rpc_sync(0, kMultiply, a + 1, b) + a;
}
constexpr Function<there_and_back> kThereAndBack{"there_and_back"};
void work(Worker& worker, std::int64_t time) { worker.runtime().executor.sleep(milliseconds(time)); }
constexpr Function<work> kWork{"work"};
/// Its gradient has a layout that cannot be sent.
struct Compress : torch::autograd::Function<Compress> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].to_sparse_csr()};
  }
};
at::Tensor compressed(const at::Tensor& x) { return Compress::apply(x); }
constexpr Function<compressed> kCompressed{"compressed"};

ClusterOptions world() {
  return autograd_world(2, FunctionTable().add(kMultiply, kThereAndBack, kWork, kCompressed));
}

/// The gradients of 40 calls are sent at once, and those of the calls that these made.
void differentiate_many_at_once(const ClusterOptions& options) {
  on_first(options, [](Worker& worker) {
    for (const PassMode mode : {PassMode::kSmart, PassMode::kFast}) {
      const at::Tensor a = wide(), b = wide(), factor = wide().detach();
      Context context(worker);
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (int i = 0; i < 40; ++i)
        loss = loss + (worker.rpc_sync("worker1", kThereAndBack, a, b) * factor).sum();
      const TimePoint begin = now(worker);
      context.backward(loss, {.mode = mode, .timeout = seconds(60)});
      EXPECT_LT(now(worker) - begin, seconds(20));
      expect_equal(context.gradient(a), 40 * (b.detach() + 1) * factor);
      expect_equal(context.gradient(b), 40 * (a.detach() + 1) * factor);
    }
  });
}

TEST(AutogradQueueSpace, IsAwaitedInTheQueueOfTheReceiver) {
  ClusterOptions options = world();
  options.threads = 1;
  options.service.max_waiting_bytes = 50'000;
  differentiate_many_at_once(options);
}

TEST(AutogradQueueSpace, IsAwaitedOnTheConnection) {
  ClusterOptions options = world();
  options.max_unsent = 40'000;
  differentiate_many_at_once(options);
}

/// Worker 1 has no free thread for longer than the pass may last.
TEST(AutogradQueueSpace, ThatNeverBecomesFreeIsNamedWhenThePassIsLate) {
  ClusterOptions options = world();
  options.threads = 1;
  options.service.max_waiting_bytes = 50'000;
  on_first(options, [](Worker& worker) {
    const at::Tensor a = wide(), factor = wide().detach();
    Context context(worker);
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int i = 0; i < 10; ++i) loss = loss + (worker.rpc_sync("worker1", kMultiply, a, a) * factor).sum();
    const auto busy = worker.rpc_async("worker1", kWork, 10'000);
    const Error error = error_of([&] { context.backward(loss, {.timeout = seconds(2)}); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.message(),
                AllOf(HasSubstr("worker 'worker0'"), HasSubstr("messages to worker 'worker1'"),
                      HasSubstr("are queued"), HasSubstr("max_waiting_bytes")));
    EXPECT_THAT(error.message(), Not(HasSubstr("lost worker")));
    busy.wait();
    context.backward(worker.rpc_sync("worker1", kMultiply, a, a).sum());
  });
}

TEST(AutogradQueueSpace, AGradientThatCannotBeSentIsNotALostWorker) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = at::ones({3, 3}, at::kDouble).set_requires_grad(true);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kCompressed, a).sum();
    const Error error = error_of([&] { context.backward(loss); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure) << error.what();
    EXPECT_EQ(error.worker(), "worker1");
    EXPECT_THAT(error.message(),
                AllOf(HasSubstr("its layout is SparseCsr"), HasSubstr("'compressed'"),
                      HasSubstr("autograd_queue_space.cpp:"), Not(HasSubstr("lost worker"))));
  });
}

}  // namespace
}  // namespace torchspan::autograd_queue_space
