// The environment of a call: LibTorch's thread-local state, what it holds, and which thread waits for it.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <torchspan/rpc/worker.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_environments {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// State that the tests and their functions share.
struct Shared {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> argument;
  std::shared_ptr<Promise<void>> answer;
  std::int64_t served = 0;
};

at::Tensor twice(const at::Tensor& x) { return x * 2; }
void sleep_ms(Worker& worker, std::int64_t ms) { nap(worker, milliseconds(ms)); }
void leave_grad_mode_off(std::int64_t) { at::GradMode::set_enabled(false); }
bool grad_mode(std::int64_t) { return at::GradMode::is_enabled(); }
Future<void> keep_nothing(Worker& worker, const at::Tensor& x);
Task<void> end_its_own(Worker& worker, at::Tensor x);
std::int64_t call_back(Worker& worker);
void count(Worker& worker) { ++state_of<Shared>(worker).served; }
void scope_inline(Worker& worker) { const WaitScope calls(worker); }

constexpr Function<twice> kTwice{"twice"};
constexpr Function<sleep_ms> kSleepMs{"sleep_ms"};
constexpr Function<leave_grad_mode_off> kLeaveGradModeOff{"leave_grad_mode_off"};
constexpr Function<grad_mode> kGradMode{"grad_mode"};
constexpr Function<keep_nothing> kKeepNothing{"keep_nothing"};
constexpr Function<end_its_own> kEndItsOwn{"end_its_own"};
constexpr Function<call_back> kCallBack{"call_back"};
constexpr Function<count> kCount{"count"};
constexpr Function<scope_inline> kScopeInline{"scope_inline", kInline};

Future<void> keep_nothing(Worker& worker, const at::Tensor& x) {
  auto& shared = state_of<Shared>(worker);
  shared.argument.emplace(x.getIntrusivePtr());
  shared.answer = std::make_shared<Promise<void>>(worker.make_promise<void>());
  return shared.answer->future();
}

Task<void> end_its_own(Worker& worker, at::Tensor x) {
  auto& shared = state_of<Shared>(worker);
  shared.argument.emplace(x.getIntrusivePtr());
  shared.answer = std::make_shared<Promise<void>>(worker.make_promise<void>());
  x = at::Tensor();
  co_await shared.answer->future();
}

/// Waits for calls that need a thread here. Returns how many had been served when the scope ended.
std::int64_t call_back(Worker& worker) {
  auto& shared = state_of<Shared>(worker);
  {
    WaitScope calls(worker);
    for (int i = 0; i < 3; ++i) static_cast<void>(calls.rpc_async(worker.rank(), kCount));
  }
  return shared.served;
}

ClusterOptions world(Shared& shared) {
  return with_state(
      world_of(2, FunctionTable().add(kTwice, kSleepMs, kLeaveGradModeOff, kGradMode, kKeepNothing,
                                      kEndItsOwn, kCallBack, kCount, kScopeInline)),
      shared);
}

struct Setup {
  Duration spin = Duration::zero();
  std::size_t threads = 4, max_threads = 256;
};

void on_first(const Setup& setup, const std::function<void(Worker&, Shared&)>& body) {
  for (std::uint64_t seed = 1; seed <= 10 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Shared shared;
    ClusterOptions options = world(shared);
    options.seed = seed;
    options.spin = setup.spin;
    options.threads = setup.threads;
    options.service.max_threads = setup.max_threads;
    SimCluster cluster(options);
    cluster.run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker, shared);
    });
  }
}
void on_first(const std::function<void(Worker&, Shared&)>& body) { on_first(Setup(), body); }

/// A waiting caller reads the replies of all threads. Under inference mode it turned them into inference
/// tensors, which autograd does not accept.
TEST(RpcEnvironments, RepliesThatAnotherThreadReadsAreOrdinaryTensors) {
  on_first({.spin = microseconds(150)}, [](Worker& worker, Shared&) {
    Executor& executor = worker.runtime().executor;
    auto waiter = executor.spawn("waiter", [&] {
      const c10::InferenceMode inference;
      for (int i = 0; i < 20; ++i) worker.rpc_sync(1, kSleepMs, 1);
    });
    for (int i = 0; i < 40; ++i) {
      const Future<at::Tensor> reply = worker.rpc_async(1, kTwice, at::ones({2}));
      nap(worker, microseconds(300));
      ASSERT_TRUE(reply.done());
      EXPECT_FALSE(reply.wait().is_inference());
      const at::Tensor w = at::ones({2}).requires_grad_();
      EXPECT_TRUE((reply.wait() * w).requires_grad());
    }
  });
}

TEST(RpcEnvironments, AHandlerLeavesItsThreadAsItWas) {
  on_first({.threads = 1}, [](Worker& worker, Shared&) {
    for (int i = 0; i < 5; ++i) {
      worker.rpc_sync(1, kLeaveGradModeOff, 0);
      EXPECT_TRUE(worker.rpc_sync(1, kGradMode, 0));
    }
  });
}

TEST(RpcEnvironments, ContinuationsKeepTheGradModeOfWhereTheyWereAdded) {
  on_first([](Worker& worker, Shared&) {
    const auto ask = [](const Future<at::Tensor>&) { return at::GradMode::is_enabled(); };
    const auto call = worker.rpc_async(1, kTwice, at::ones({2}));
    const Future<bool> before = call.then(ask);
    const Future<bool> inside = [&] {
      const at::NoGradGuard no_grad;
      return call.then(ask);
    }();
    const Future<bool> after = inside.then([](const Future<bool>&) { return at::GradMode::is_enabled(); });
    EXPECT_TRUE(before.wait());
    EXPECT_FALSE(inside.wait());
    EXPECT_TRUE(after.wait());
  });
}

TEST(RpcEnvironments, ArgumentsEndWithTheFunctionThatTookThem) {
  on_first([](Worker& worker, Shared& shared) {
    for (const int to : {0, 1}) {
      for (const bool coroutine : {false, true}) {
        const Future<void> reply = coroutine ? worker.rpc_async(to, kEndItsOwn, at::ones({1000}))
                                             : worker.rpc_async(to, kKeepNothing, at::ones({1000}));
        nap(worker, milliseconds(1));
        ASSERT_TRUE(shared.argument);
        EXPECT_FALSE(reply.done());
        EXPECT_TRUE(shared.argument->expired()) << (coroutine ? "coroutine" : "function");
        shared.answer->set_value();
        reply.wait();
        shared.argument.reset();
      }
    }
  });
}

/// With only one thread, the destructor's wait fails. It used to return while the calls were pending.
TEST(RpcEnvironments, AWaitScopeStaysUntilItsCallsHaveEnded) {
  on_first({.threads = 1, .max_threads = 1}, [](Worker& worker, Shared& shared) {
    shared.served = 0;
    EXPECT_EQ(worker.rpc_sync(1, kCallBack), 3);
  });
}

TEST(RpcEnvironments, AWaitScopeIsRefusedWhereNothingMayWait) {
  on_first([](Worker& worker, Shared&) {
    expect_error(ErrorKind::kRemoteFailure, "declared kInline", [&] { worker.rpc_sync(1, kScopeInline); });
  });
}

TEST(RpcEnvironments, APromiseIsMadeFromAWorker) {
  on_first([](Worker& worker, Shared&) {
    Promise<std::int64_t> number = worker.make_promise<std::int64_t>();
    const Future<std::int64_t> next =
        number.future().then([](Future<std::int64_t> n) { return n.wait() + 1; });
    auto thread = worker.runtime().executor.spawn("sets", [&] {
      nap(worker, milliseconds(5));
      number.set_value(41);
    });
    EXPECT_EQ(next.wait(seconds(1)), 42);
    const auto count = [](const Worker& on) -> Task<std::int64_t> {
      const at::NoGradGuard no_grad;
      co_await on.rpc_async(1, kSleepMs, 1);
      co_return at::GradMode::is_enabled() ? 1 : 7;
    };
    EXPECT_EQ(worker.start(count(worker)).wait(), 7) << "a coroutine keeps its own grad mode";
    EXPECT_TRUE(at::GradMode::is_enabled());
  });
}

/// Throws once, on the chosen thread.
class FaultyTransport final : public net::Transport {
 public:
  FaultyTransport(std::unique_ptr<net::Transport> inner, const Thread& on)
      : inner_(std::move(inner)), on_(on) {}
  std::string listen(const std::string& address) override { return inner_->listen(address); }
  bool can_reach(const std::string& address) const override { return inner_->can_reach(address); }
  std::shared_ptr<net::Channel> connect(const std::string& address, Deadline deadline) override {
    return inner_->connect(address, deadline);
  }
  bool poll() override {
    if (on_.is_current() && !std::exchange(thrown_, true)) throw std::bad_alloc();
    return inner_->poll();
  }
  void wait(Deadline deadline) override { inner_->wait(deadline); }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<net::Transport> inner_;
  const Thread& on_;
  bool thrown_ = false;
};

/// It kept the driver lock forever: no other thread got a reply.
TEST(RpcEnvironments, ACallerWhoseDrivingThrowsLetsOthersDrive) {
  Shared shared;
  Thread faulty;
  ClusterOptions options = world(shared);
  options.spin = microseconds(150);
  options.wrap = [&](int rank, std::unique_ptr<net::Transport> made) -> std::unique_ptr<net::Transport> {
    if (rank != 0) return made;
    return std::make_unique<FaultyTransport>(std::move(made), faulty);
  };
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    worker.rpc_sync(1, kCount);
    bool ended = false;
    faulty = worker.runtime().executor.spawn("faulty", [&] {
      bool thrown = false;
      for (int i = 0; i < 20 && !thrown; ++i) {  // until the dispatching thread lets it drive
        try {
          worker.rpc_sync(1, kCount);
        } catch (const std::bad_alloc&) {
          thrown = true;
        }
      }
      EXPECT_TRUE(thrown);
      for (int i = 0; i < 3; ++i) EXPECT_NO_THROW(worker.rpc_sync(1, kCount));
      ended = true;
    });
    while (!ended) nap(worker, milliseconds(1));  // a thread that is being joined has no identity
    faulty.join();
  });
}

}  // namespace
}  // namespace torchspan::rpc_environments
