// TorchScript functions and modules, called by name.
#include <ATen/ATen.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/resolver.h>

#include <torchspan/core/future.h>

#include "tests/parity/rpc_faults.h"

namespace torchspan::rpc_scripts {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

std::shared_ptr<torch::jit::CompilationUnit> make_unit() {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  unit->define(c10::QualifiedName("script"), R"(
def no_arg() -> Tensor:
    return torch.ones([2, 2])

def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y

def heavy(x: Tensor) -> Tensor:
    for i in range(100):
        x = x * 2 / 2
    return x

def raise_func(text: str) -> Tensor:
    assert len(text) > 100, text
    return torch.ones([2])
)",
               torch::jit::nativeResolver(), nullptr);
  return unit;
}
torch::jit::Module make_module(double start) {
  torch::jit::Module module("Accumulator");
  module.register_buffer("total", at::full({2}, start));
  module.define(R"(
def forward(self) -> Tensor:
    return self.total

def custom_func(self, by: Tensor) -> Tensor:
    self.total.add_(by)
    return self.total
)");
  return module;
}
c10::IValue run_module(const RRef<torch::jit::Module>& module) { return module.rpc_sync("forward", {}); }
RRef<torch::jit::Module> same(const RRef<torch::jit::Module>& module) { return module; }
std::int64_t slow(Worker& worker) {
  nap(worker, seconds(1));
  return 0;
}
Future<c10::IValue> add_by_script(Worker& worker, const WorkerInfo& to, const at::Tensor& x,
                                  const at::Tensor& y) {
  return worker.rpc_async(to, "script.add", {x, y});
}
Future<at::Tensor> async_add(Worker& worker, const WorkerInfo& to, const at::Tensor& x, const at::Tensor& y) {
  return add_by_script(worker, to, x, y).then([](Future<c10::IValue> sum) { return sum.wait().toTensor(); });
}
Task<at::Tensor> await_adds(Worker& worker, const WorkerInfo& to, const at::Tensor& x, std::int64_t times) {
  at::Tensor sum = x;
  for (std::int64_t i = 0; i < times; ++i) sum = (co_await add_by_script(worker, to, sum, x)).toTensor();
  co_return sum;
}

constexpr Function<make_module> kMakeModule{"make_module"};
constexpr Function<run_module> kRunModule{"run_module"};
constexpr Function<same> kSame{"same"};
constexpr Function<slow> kSlow{"slow"};
constexpr Function<async_add> kAsyncAdd{"async_add"};
constexpr Function<await_adds> kAwaitAdds{"await_adds"};

ClusterOptions world(int workers = 2) {
  return world_of(workers, FunctionTable()
                               .add(kMakeModule, kRunModule, kSame, kSlow, kAsyncAdd, kAwaitAdds)
                               .add_script(make_unit()));
}
at::Tensor pair_of(double value) { return at::full({2}, value); }
bool same_values(const c10::IValue& value, const at::Tensor& expected) {
  return at::equal(value.toTensor(), expected);
}

// peer: jit/rpc_test.py torchscript_function: same: by the name in the callee's table
TEST(RpcConformance, TorchscriptFunction) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor x = at::ones({3});
    for (const char* to : {"worker1", "worker0"}) {
      EXPECT_TRUE(same_values(worker.rpc_sync(to, "script.add", {x, x}), x * 2));
      EXPECT_TRUE(same_values(worker.rpc_sync(to, "script.no_arg", {}), at::ones({2, 2})));
      EXPECT_TRUE(same_values(worker.remote(to, "script.add", {x, x}).to_here(), x * 2));
    }
  });
}

// peer: jit/rpc_test.py torchscript_function_exception: same: found on the callee; the error shows the
//   schema
TEST(RpcConformance, TorchscriptFunctionException) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor x = at::ones({3});
    const auto refuse = [&](std::vector<c10::IValue> args) {
      expect_error(ErrorKind::kInvalid, "no_arg() -> Tensor",
                   [&] { worker.rpc_sync("worker1", "script.no_arg", args); });
      expect_error(ErrorKind::kInvalid, "no_arg() -> Tensor",
                   [&] { worker.remote("worker1", "script.no_arg", args).to_here(); });
    };
    refuse({10});
    refuse({x, x});
    expect_error(ErrorKind::kInvalid, "add(Tensor x, Tensor y)",
                 [&] { worker.rpc_sync("worker1", "script.add", {x}); });
  });
}

// peer: jit/rpc_test.py call_script_function_that_not_exists_remotely_from_script: same
TEST(RpcConformance, CallScriptFunctionThatNotExistsRemotely) {
  on_first(world(), [](Worker& worker) {
    expect_error(ErrorKind::kInvalid, "script.nonexisting",
                 [&] { worker.rpc_sync("worker1", "script.nonexisting", {}); });
  });
}

// peer: jit/rpc_test.py remote_script_udf: same
TEST(RpcConformance, RemoteScriptUdf) {
  on_first(world(), [](Worker& worker) {
    auto result = worker.remote("worker1", "script.heavy", {at::ones({2})});
    EXPECT_TRUE(same_values(result.to_here(), at::ones({2})));
  });
}

// peer: jit/rpc_test.py remote_script_throw, call_script_function_that_raises_remotely_from_script: same
TEST(RpcConformance, RemoteScriptThrow) {
  on_first(world(), [](Worker& worker) {
    auto failed = worker.remote("worker1", "script.raise_func", {"Expected error"});
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { failed.to_here(); });
  });
}

// peer: jit/rpc_test.py async_script_udf: same
TEST(RpcConformance, AsyncScriptUdf) {
  on_first(world(), [](Worker& worker) {
    auto sum = worker.rpc_async("worker1", "script.add", {at::ones({2}), at::ones({2})});
    auto next = sum.then([](Future<c10::IValue> done) { return done.wait().toTensor() + 1; });
    EXPECT_TRUE(at::equal(next.wait(), pair_of(3)));
  });
}

// peer: jit/rpc_test.py async_script_throw: same
TEST(RpcConformance, AsyncScriptThrow) {
  on_first(world(), [](Worker& worker) {
    auto failed = worker.rpc_async("worker1", "script.raise_func", {"Expected error"});
    const Error error = error_of([&] { failed.wait(); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    ASSERT_EQ(error.frames().size(), 1u);
    EXPECT_EQ(error.frames()[0].worker, "worker1");
    EXPECT_EQ(error.frames()[0].call, "script.raise_func");
    auto derived = failed.then([](Future<c10::IValue> done) { return done.wait(); });
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { derived.wait(); });
  });
}

// peer: rpc_test.py stress_heavy_rpc_torchscript: same
TEST(RpcConformance, StressHeavyRpcTorchscript) {
  on_first(world(), [](Worker& worker) {
    std::vector<Future<c10::IValue>> calls;
    for (int i = 0; i < 20; ++i)
      calls.push_back(worker.rpc_async("worker1", "script.heavy", {at::full({10, 10}, i)}));
    const auto values = wait_all(calls);
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(same_values(values[i], at::full({10, 10}, i)));
  });
}

// peer: rpc_test.py wait_all_exit_early_script_function: same
TEST(RpcConformance, WaitAllExitEarlyScriptFunction) {
  on_first(world(3), [](Worker& worker) {
    auto slow_one =
        worker.rpc_async("worker2", kSlow).then([](Future<std::int64_t> n) { return c10::IValue(n.wait()); });
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] {
      wait_all(std::vector<Future<c10::IValue>>{
          slow_one, worker.rpc_async("worker1", "script.raise_func", {"Expected error"})});
    });
    EXPECT_LT(now(worker) - begin, milliseconds(100));
    EXPECT_FALSE(slow_one.done());
    slow_one.wait();
  });
}

// peer: jit/rpc_test.py async_function_*: same: with one handler thread per worker
TEST(RpcConformance, AsyncFunctionsWaitForScripts) {
  ClusterOptions options = world(3);
  options.threads = 1;
  on_first(options, [](Worker& worker) {
    const at::Tensor x = at::ones({2});
    const WorkerInfo third = worker.info("worker2");
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker1", kAsyncAdd, third, x, x), pair_of(2)));
    EXPECT_TRUE(at::equal(worker.rpc_async("worker1", kAwaitAdds, third, x, 20).wait(), pair_of(21)));
    EXPECT_TRUE(at::equal(worker.remote("worker1", kAsyncAdd, third, x, x).to_here(), pair_of(2)));
  });
}

// peer: jit/rpc_test.py remote_script_module, create_script_module_on_remote,
//   torchscript_functions_not_supported: better: methods of a remote module are called by name, from any
//   worker
// peer: remote_module_test.py forward_sync_script, forward_async_script: same: a scripted module is called
//   by `rref.rpc_sync("forward", …)`; `rpc_async` is the same without the wait
TEST(RpcConformance, RemoteScriptModule) {
  on_first(world(3), [](Worker& worker) {
    auto module = worker.remote("worker1", kMakeModule, 10.0);
    EXPECT_TRUE(same_values(module.rpc_sync("forward", {}), pair_of(10)));
    EXPECT_TRUE(same_values(module.rpc_async("custom_func", {at::ones({2})}).wait(), pair_of(11)));
    EXPECT_TRUE(
        same_values(module.remote("custom_func", {}, {{"by", at::ones({2})}}).to_here(), pair_of(12)));
    EXPECT_TRUE(same_values(worker.rpc_sync("worker1", kRunModule, module), pair_of(12))) << "its owner";
    EXPECT_TRUE(same_values(worker.rpc_sync("worker2", kRunModule, module), pair_of(12))) << "a third one";
    EXPECT_TRUE(same_values(worker.rpc_sync("worker2", kSame, module).rpc_sync("forward", {}), pair_of(12)));
    expect_error(ErrorKind::kInvalid, "forward, custom_func", [&] { module.rpc_sync("backward", {}); });
    static_assert(!wire::Transferable<torch::jit::Module>, "a module stays on its worker");
  });
}

// peer: jit/rpc_test.py create_local_script_module_rref_in_py,
//   return_local_script_module_rref_in_py_and_use_in_script: same
TEST(RpcConformance, CreateLocalScriptModuleRref) {
  on_first(world(), [](Worker& worker) {
    RRef<torch::jit::Module> mine(worker, make_module(3));
    EXPECT_TRUE(same_values(mine.rpc_sync("forward", {}), pair_of(3)));
    EXPECT_TRUE(at::equal(mine.local_value().forward({}).toTensor(), pair_of(3)));
    EXPECT_TRUE(same_values(worker.rpc_sync("worker1", kRunModule, mine), pair_of(3)));
  });
}

/// Worker 0 with access to the network, which delays its requests of that type by two seconds.
void with_late_requests(wire::MessageType type, const std::function<void(Worker&)>& body) {
  SimCluster cluster(world());
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    cluster.network().delay_if(requests_of(type), seconds(2));
    body(worker);
    cluster.network().delay_if({}, {});
  });
}

// peer: rpc_test.py rpc_script_timeout: same
// peer: faulty_agent_rpc_test.py timeout_in_torchscript_function, timeout_in_python: same
TEST(RpcConformance, RpcScriptTimeout) {
  with_late_requests(rpc::kCallOperator, [](Worker& worker) {
    const at::Tensor x = at::ones({2});
    const auto call = [&](const Caller& caller) { caller.rpc_sync("worker1", "script.add", {x, x}); };
    expect_error(ErrorKind::kTimedOut, "script.add", [&] { call(worker.with({.timeout = seconds(1)})); });
    worker.set_default_timeout(milliseconds(1));
    expect_error(ErrorKind::kTimedOut, "script.add", [&] { call(worker); });
    call(worker.with({.timeout = Duration::zero()}));
    call(worker.with({.timeout = seconds(10)}));
  });
}

// peer: faulty_agent_rpc_test.py rref_to_here_timeout_in_jit: same
TEST(RpcConformance, RrefToHereTimeoutInJit) {
  with_late_requests(rpc::kFetch, [](Worker& worker) {
    auto sum = worker.remote("worker1", "script.add", {at::ones({2}), at::ones({2})});
    sum.creation().wait();
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.to_here(milliseconds(10)); });
    EXPECT_TRUE(same_values(sum.to_here(), pair_of(2)));
  });
}

// peer: faulty_agent_rpc_test.py remote_timeout_to_here_in_jit: same
TEST(RpcConformance, RemoteTimeoutToHereInJit) {
  with_late_requests(rpc::kCreateByOperator, [](Worker& worker) {
    auto sum =
        worker.with({.timeout = seconds(1)}).remote("worker1", "script.add", {at::ones({2}), at::ones({2})});
    expect_error(ErrorKind::kTimedOut, "script.add", [&] { sum.creation().wait(); });
    expect_error(ErrorKind::kTimedOut, "script.add", [&] { sum.to_here(); });
  });
}

// peer: faulty_agent_rpc_test.py remote_message_script_delay_timeout: same
TEST(RpcConformance, RemoteMessageScriptDelayTimeout) {
  SimCluster cluster(world());
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 1) {
      nap(worker, seconds(20));
      EXPECT_EQ(worker.debug().references.owners, 0u) << "the late creation has no user any more";
      return;
    }
    cluster.network().delay_if(requests_of(rpc::kCreateByOperator), seconds(5));
    {
      auto late = worker.with({.timeout = seconds(1)}).remote("worker1", "script.heavy", {at::ones({2})});
      expect_error(ErrorKind::kTimedOut, "script.heavy", [&] { late.creation().wait(); });
    }
    cluster.network().delay_if({}, {});
    nap(worker, seconds(20));
  });
}

// peer: faulty_agent_rpc_test.py rref_timeout_pickle_in_jit, rref_timeout_pickle_script_func: same: rejected
//   with the failure of the creation
TEST(RpcConformance, RrefTimeoutPickleScriptFunc) {
  with_late_requests(rpc::kCreateRemote, [](Worker& worker) {
    auto module = worker.with({.timeout = seconds(1)}).remote("worker1", kMakeModule, 1.0);
    expect_error(ErrorKind::kTimedOut, "make_module", [&] { module.creation().wait(); });
    expect_error(ErrorKind::kTimedOut, "make_module", [&] { module.rpc_sync("forward", {}); });
    expect_error(ErrorKind::kTimedOut, "make_module",
                 [&] { worker.rpc_sync("worker1", kRunModule, module); });
  });
}

}  // namespace
}  // namespace torchspan::rpc_scripts
