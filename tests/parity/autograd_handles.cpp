// Handles that outlive their worker: every operation on them throws kCancelled with advice, and their
// destructors do nothing. They used to read the runtime of a destroyed session.
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/rpc/remote_module.h>
#include <torchspan/rpc/worker.h>

#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_handles {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct KeptLayerImpl : torch::nn::Module {
  KeptLayerImpl() {
    linear = register_module("linear", torch::nn::Linear(3, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(KeptLayer);

at::Tensor twice(const at::Tensor& x) { return x + x; }
constexpr ModuleClass<KeptLayer> kLayer{"Layer"};
constexpr Function<twice> kTwice{"twice"};

at::Tensor input() { return at::ones({2, 3}, at::kDouble); }

ClusterOptions world(int workers, std::uint64_t seed, bool open) {
  ClusterOptions options = world_of(workers, FunctionTable().add(kLayer, kTwice));
  options.seed = seed;
  options.open = open;
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<AutogradExtension>());
    extensions.push_back(std::make_unique<optim::OptimExtension>());
    return extensions;
  };
  return options;
}

/// One of each handle that refers to a worker.
struct Handles {
  explicit Handles(Worker& on, const Destination& to)
      : worker(on),
        caller(on.with({.timeout = seconds(5)})),
        module(on, to, kLayer),
        mine(on, input().set_requires_grad(true)),
        theirs(on.remote(to, kTwice, input())),
        optimizer(on, optim::SGD{.lr = 0.1}, {module, mine}),
        schedule(optimizer, optim::StepLR{.step_size = 1}),
        context(std::make_unique<Context>(on)) {
    theirs.creation().wait();
    loss = (module.forward(input()) * mine.local_value()).sum();
    view.emplace(*context);
    context->backward(loss, {.retain_graph = true});
    optimizer.step(*context);
    calls = std::make_unique<WaitScope>(on);
    result = calls->rpc_async(to, kTwice, input());
    calls->wait();
  }

  Worker worker;
  Caller caller;
  RemoteModule<KeptLayer> module;
  RRef<at::Tensor> mine, theirs;
  optim::DistributedOptimizer optimizer;
  optim::LRScheduler schedule;
  std::unique_ptr<Context> context;
  std::optional<autograd::ContextView> view;
  at::Tensor loss;
  std::unique_ptr<WaitScope> calls;
  Future<at::Tensor> result;
};

void expect_cancelled(const char* verb, const std::function<void()>& use) {
  SCOPED_TRACE(verb);
  const Error error = error_of(use);
  EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
  EXPECT_THAT(error.what(), ::testing::AnyOf(HasSubstr("make no calls after shutdown()"),
                                             HasSubstr("it cannot be used any more")));
}

void expect_all_cancelled(Handles& handles, const Destination& to) {
  const Worker& worker = handles.worker;
  expect_cancelled("rpc_sync", [&] { worker.rpc_sync(to, kTwice, input()); });
  expect_cancelled("rpc_async", [&] { worker.rpc_async(to, kTwice, input()).wait(); });
  expect_cancelled("an operator", [&] { worker.rpc_sync(to, "aten::neg", {input()}); });
  expect_cancelled("remote", [&] { worker.remote(to, kTwice, input()).to_here(); });
  expect_cancelled("with", [&] { handles.caller.rpc_sync(to, kTwice, input()); });
  expect_cancelled("WaitScope", [&] { handles.calls->rpc_sync(to, kTwice, input()); });
  expect_cancelled("barrier", [&] { worker.barrier({"worker0"}); });
  expect_cancelled("forward", [&] { handles.module.forward(input()); });
  expect_cancelled("train", [&] { handles.module.with({.timeout = seconds(1)}).train(); });
  expect_cancelled("to_here", [&] { handles.theirs.to_here(); });
  expect_cancelled("Context", [&] { const Context another(worker); });
  expect_cancelled("backward", [&] { handles.context->backward(handles.loss); });
  expect_cancelled("backward of a reference", [&] { handles.view->backward(handles.mine); });
  expect_cancelled("clear_gradients", [&] { handles.context->clear_gradients(); });
  expect_cancelled("explain", [&] { static_cast<void>(handles.view->explain()); });
  expect_cancelled("step", [&] { handles.optimizer.step(*handles.context); });
  expect_cancelled("step_in_backward", [&] { handles.optimizer.step_in_backward(*handles.view); });
  expect_cancelled("clip_grad_norm", [&] { handles.optimizer.clip_grad_norm(*handles.view, 1); });
  expect_cancelled("a new optimizer",
                   [&] { optim::DistributedOptimizer(worker, optim::SGD{.lr = 1}, {handles.mine}); });
  expect_cancelled("state_dict", [&] { handles.optimizer.state_dict(); });
  expect_cancelled("state_shards", [&] { handles.optimizer.state_shards(); });
  handles.schedule.step();
  EXPECT_THAT(handles.theirs.str(), HasSubstr("RRef(value"));
  EXPECT_EQ(worker.name(), "worker0");
  EXPECT_EQ(worker.debug().pending.size(), 0u);
  EXPECT_TRUE(handles.result.wait().equal(input() * 2));
  EXPECT_TRUE(handles.mine.local_value().defined());
  EXPECT_TRUE(handles.view->gradient(handles.mine.local_value()).defined());
  handles.context->release();
}

TEST(Handles, AnswerCancelledOnceTheirWorkerHasEnded) {
  for (const int workers : {1, 2}) {
    for (const bool open : {false, true}) {
      for (const bool graceful : {true, false}) {
        SCOPED_TRACE(std::to_string(workers) + (open ? " open" : "") + (graceful ? " graceful" : ""));
        SimCluster cluster(world(workers, static_cast<std::uint64_t>(workers), open));
        const Destination to = workers - 1;
        std::unique_ptr<Handles> handles;
        const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
          Worker& worker = service.worker();
          while (worker.world_size() < workers) worker.runtime().executor.sleep(milliseconds(1));
          if (worker.rank() == 0) {
            handles = std::make_unique<Handles>(worker, to);
          } else {
            worker.runtime().executor.sleep(seconds(1));
          }
          if (graceful) service.shutdown(cluster.executor().deadline_in(seconds(60)));
        });
        for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
        ASSERT_TRUE(handles);
        expect_all_cancelled(*handles, to);
        handles.reset();
      }
    }
  }
}

/// The clock, the log and the spans live as long as any handle, and no longer.
TEST(Handles, ShareTheRuntimeOfTheirWorker) {
  SimExecutor executor(1);
  std::weak_ptr<Runtime> life;
  std::optional<Worker> worker;
  Future<at::Tensor> result;
  executor.run([&] {
    auto runtime = std::make_shared<Runtime>(executor, "worker0");
    life = runtime;
    rpc::WorkerService service(runtime, FunctionTable().add(kTwice), {}, {}, {});
    rendezvous::MembershipOptions alone;
    alone.name = "worker0";
    alone.rank = 0;
    alone.world_size = 1;
    service.start(rendezvous::Membership::join(*runtime, {}, alone));
    runtime.reset();
    worker = service.worker();
    result = worker->rpc_async(0, kTwice, input());
    result.wait();
  });
  EXPECT_FALSE(life.expired());
  expect_error(ErrorKind::kCancelled, "'worker0' was shut down",
               [&] { worker->rpc_sync(0, kTwice, input()); });
  worker.reset();
  EXPECT_TRUE(life.expired());
  EXPECT_TRUE(result.wait().equal(input() * 2));
}

/// A thread that waits in a gather of the world when its worker ends.
TEST(Handles, LeaveARoundOfTheWorldAsTheirWorkerEnds) {
  SimCluster cluster(world(2, 3, false));
  std::vector<Thread> threads;
  cluster.try_services([&](rpc::WorkerService& service) {
    if (service.worker().rank() != 0) {
      cluster.executor().sleep(seconds(5));
      return threads.clear();
    }
    threads.push_back(cluster.executor().spawn("waiter", [worker = service.worker()] {
      EXPECT_THROW(worker.barrier(), Error);
      EXPECT_THROW(worker.barrier(), Error);
    }));
    cluster.executor().sleep(seconds(1));
  });
  EXPECT_TRUE(threads.empty());
}

}  // namespace
}  // namespace torchspan::autograd_handles
