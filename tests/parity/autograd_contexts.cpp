// Contexts: which workers have one, what it records of calls, and how it ends.
#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_contexts {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor nested_add(Worker& worker, std::int64_t to, const at::Tensor& a, const at::Tensor& b);
at::Tensor held(Worker& worker, bool sparse) { return Kind(sparse).make(7 + worker.rank()); }
at::Tensor add_list(const std::vector<at::Tensor>& tensors) {
  at::Tensor sum = tensors[0];
  for (std::size_t i = 1; i < tensors.size(); ++i) sum = at::add(sum, tensors[i]);
  return sum;
}
std::int64_t context_id(Worker& worker) {
  return autograd::has_current() ? static_cast<std::int64_t>(autograd::current(worker).id()) : 0;
}
at::Tensor constant(std::int64_t value) { return at::full({2}, value, at::kDouble); }
at::Tensor raise(const at::Tensor&) { throw std::runtime_error("Expected error"); }
std::vector<bool> need_gradients(const at::Tensor& a, const at::Tensor& b) {
  return {a.requires_grad(), b.requires_grad()};
}

std::int64_t keys(Worker& worker) {
  return static_cast<std::int64_t>(autograd::current(worker).gradients().size());
}

/// What arrived at worker 1.
struct Pushes {
  int all = 0, without_context = 0;
  std::string refusal;
};
at::Tensor push(Worker& worker, const at::Tensor& x) {
  auto& pushes = state_of<Pushes>(worker);
  ++pushes.all;
  if (!autograd::has_current()) {
    ++pushes.without_context;
    EXPECT_FALSE(x.requires_grad()) << "it is not a leaf";
    pushes.refusal = error_of([&] { autograd::current(worker); }).message();
  }
  return x * 2;
}

constexpr Function<push> kPush{"push"};
constexpr Function<add> kAdd{"add"};
constexpr Function<nested_add> kNestedAdd{"nested_add"};
constexpr Function<held> kHeld{"held"};
constexpr Function<add_list> kAddList{"add_list"};
constexpr Function<context_id> kContextId{"context_id"};
constexpr Function<constant> kConstant{"constant"};
constexpr Function<raise> kRaise{"raise"};
constexpr Function<need_gradients> kNeed{"need_gradients"};
constexpr Function<keys> kKeys{"keys"};

at::Tensor nested_add(Worker& worker, std::int64_t to, const at::Tensor& a, const at::Tensor& b) {
  return worker.rpc_sync(to, kAdd, a, b);
}

ClusterOptions world(int workers = 2) {
  return autograd_world(workers, FunctionTable().add(kAdd, kNestedAdd, kHeld, kAddList, kContextId, kConstant,
                                                     kRaise, kNeed, kKeys, kPush));
}

void expect_no_contexts(SimCluster& cluster, Worker& worker) {
  cluster.executor().sleep(milliseconds(100));
  EXPECT_EQ(counts_of(worker).contexts, 0U);
  EXPECT_EQ(counts_of(worker).passes, 0U);
}

/// Runs on worker 0; afterwards no worker has a context.
void on_first_and_clean(int workers, const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ClusterOptions options = world(workers);
    options.seed = seed;
    SimCluster cluster(std::move(options));
    cluster.run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
      worker.barrier();
      expect_no_contexts(cluster, worker);
    });
  }
}

class AutogradContexts : public DenseAndSparse {};
INSTANTIATE_TEST_SUITE_P(Kinds, AutogradContexts, ::testing::Bool(),
                         [](const auto& run) { return run.param ? "Sparse" : "Dense"; });

/// A call with two tensors that returns one: checks which tensors were sent and received, and which were made
/// from which.
void expect_graph_of_one_call(const Kind& kind, Way way, bool builtin) {
  on_first_and_clean(2, [&](Worker& worker) {
    const at::Tensor a = kind.make(1), b = kind.make(2);
    Context context(worker);
    const at::Tensor sum = builtin ? call(way, worker, "worker1", "aten::add.Tensor", {a, b})
                                   : call(way, worker, "worker1", kAdd, a, b);
    const ContextGraph graph = context.graph({kind.sum(sum)});
    EXPECT_EQ(graph.context, context.id());
    EXPECT_THAT(ranks_of(graph), ElementsAre(0, 1));
    const auto sent = sends_of(graph, 0), answered = sends_of(graph, 1);
    ASSERT_THAT(sent, SizeIs(1));
    ASSERT_THAT(answered, SizeIs(1));
    EXPECT_EQ(sent[0].to, 1U);
    EXPECT_FALSE(sent[0].reply);
    EXPECT_EQ(sent[0].tensors, 2U);
    EXPECT_EQ(sent[0].nodes, 2U) << "two leaves and nothing else";
    EXPECT_EQ(sent[0].parameters, 2U);
    EXPECT_THAT(sent[0].sources, IsEmpty());
    EXPECT_THAT(sent[0].site, HasSubstr("autograd_"));
    EXPECT_EQ(answered[0].to, 0U);
    EXPECT_TRUE(answered[0].reply);
    EXPECT_EQ(answered[0].tensors, 1U);
    EXPECT_EQ(answered[0].nodes, 1U) << "the addition";
    EXPECT_EQ(answered[0].parameters, 0U);
    EXPECT_THAT(answered[0].sources, ElementsAre(sent[0].message));
    EXPECT_THAT(loss_of(graph, 0).sources, ElementsAre(answered[0].message));
  });
}

// peer: dist_autograd_test.py graph_for_builtin_call: same (D, S), through `Context::graph()`
TEST_P(AutogradContexts, GraphForBuiltinCall) {
  for (const Way way : {Way::kSync, Way::kAsync}) expect_graph_of_one_call(kind_, way, true);
}
// peer: dist_autograd_test.py graph_for_python_call: same (D, S)
TEST_P(AutogradContexts, GraphForPythonCall) {
  for (const Way way : {Way::kSync, Way::kAsync}) expect_graph_of_one_call(kind_, way, false);
}
// peer: dist_autograd_test.py graph_for_builtin_remote_call: same (D, S)
TEST_P(AutogradContexts, GraphForBuiltinRemoteCall) { expect_graph_of_one_call(kind_, Way::kRemote, true); }
// peer: dist_autograd_test.py graph_for_python_remote_call: same (D, S)
TEST_P(AutogradContexts, GraphForPythonRemoteCall) { expect_graph_of_one_call(kind_, Way::kRemote, false); }

/// 0 → 1 → `last`: worker 1 has two sends, each made from what it received.
void expect_graph_of_nested_call(const Kind& kind, Way way, std::uint32_t last) {
  on_first_and_clean(3, [&](Worker& worker) {
    const at::Tensor a = kind.make(1), b = kind.make(2);
    Context context(worker);
    const at::Tensor sum = call(way, worker, "worker1", kNestedAdd, last, a, b);
    const ContextGraph graph = context.graph({kind.sum(sum)});
    const auto first = sends_of(graph, 0), between = sends_of(graph, 1), end = sends_of(graph, last);
    ASSERT_THAT(first, SizeIs(last == 0 ? 2 : 1));
    ASSERT_THAT(between, SizeIs(2));
    EXPECT_EQ(between[0].to, last);
    EXPECT_FALSE(between[0].reply);
    EXPECT_EQ(between[0].tensors, 2U);
    EXPECT_EQ(between[0].nodes, 0U) << "received tensors are sent on without a computation";
    EXPECT_THAT(between[0].sources, ElementsAre(first[0].message));
    EXPECT_THAT(end.back().sources, ElementsAre(between[0].message));
    EXPECT_EQ(between[1].to, 0U);
    EXPECT_TRUE(between[1].reply);
    EXPECT_THAT(between[1].sources, ElementsAre(end.back().message));
    EXPECT_THAT(loss_of(graph, 0).sources, ElementsAre(between[1].message));
  });
}

// peer: dist_autograd_test.py graph_for_py_nested_call: same (D, S)
TEST_P(AutogradContexts, GraphForPyNestedCall) { expect_graph_of_nested_call(kind_, Way::kSync, 2); }
// peer: dist_autograd_test.py graph_for_py_nested_remote_call: same (D, S)
TEST_P(AutogradContexts, GraphForPyNestedRemoteCall) { expect_graph_of_nested_call(kind_, Way::kRemote, 2); }
// peer: dist_autograd_test.py graph_for_py_nested_call_itself: same (D, S)
TEST_P(AutogradContexts, GraphForPyNestedCallItself) { expect_graph_of_nested_call(kind_, Way::kSync, 0); }
// peer: dist_autograd_test.py graph_for_py_nested_remote_call_itself: same (D, S)
TEST_P(AutogradContexts, GraphForPyNestedRemoteCallItself) {
  expect_graph_of_nested_call(kind_, Way::kRemote, 0);
}

// peer: dist_autograd_test.py `no_graph_with_tensors_not_require_grad`(`_remote`): same (D, S)
TEST_P(AutogradContexts, NoGraphWithTensorsNotRequireGrad) {
  for (const Way way : kWays) {
    on_first_and_clean(2, [&](Worker& worker) {
      const at::Tensor a = kind_.make(1, false), b = kind_.make(2, false);
      Context context(worker);
      EXPECT_FALSE(call(way, worker, "worker1", kAdd, a, b).requires_grad());
      EXPECT_EQ(call(way, worker, "worker1", kContextId), static_cast<std::int64_t>(context.id()));
      const ContextGraph graph = context.graph();
      EXPECT_THAT(ranks_of(graph), ElementsAre(0, 1));
      EXPECT_THAT(sends_of(graph, 0), IsEmpty());
      EXPECT_THAT(sends_of(graph, 1), IsEmpty());
    });
  }
}

// peer: dist_autograd_test.py rpc_complex_args, remote_complex_args: same (D, S)
TEST_P(AutogradContexts, ComplexArgs) {
  for (const Way way : kWays) {
    on_first_and_clean(2, [&](Worker& worker) {
      std::vector<at::Tensor> tensors;
      for (std::uint64_t i = 0; i < 10; ++i) tensors.push_back(kind_.make(i, i % 2 == 0));
      Context context(worker);
      const at::Tensor sum = call(way, worker, "worker1", kAddList, tensors);
      const ContextGraph graph = context.graph({kind_.sum(sum)});
      ASSERT_THAT(sends_of(graph, 0), SizeIs(1));
      EXPECT_EQ(sends_of(graph, 0)[0].tensors, 5U);
      EXPECT_EQ(sends_of(graph, 0)[0].parameters, 5U);
      EXPECT_THAT(ranks_of(graph), ElementsAre(0, 1));
      context.backward(kind_.sum(sum));
      EXPECT_THAT(context.gradients(), SizeIs(5));
    });
  }
}

// peer: dist_autograd_test.py mixed_requires_grad: same (D, S)
TEST_P(AutogradContexts, MixedRequiresGrad) {
  on_first_and_clean(2, [&](Worker& worker) {
    const at::Tensor a = kind_.make(1), b = kind_.make(2, false);
    Context context(worker);
    EXPECT_THAT(worker.rpc_sync("worker1", kNeed, a, b), ElementsAre(true, false));
    const at::Tensor sum = worker.rpc_sync("worker1", kAdd, a, b);
    EXPECT_TRUE(sum.requires_grad());
    context.backward(kind_.sum(sum));
    ASSERT_THAT(context.gradients(), SizeIs(1));
    EXPECT_TRUE(context.gradients()[0].parameter.is_same(a));
    EXPECT_FALSE(context.gradient(b).defined());
  });
}

// peer: dist_autograd_test.py (their callee treats it as a new leaf) a tensor sent without grad mode:
//   better (D, S): as in one process, it gets no gradient anywhere
TEST_P(AutogradContexts, ATensorSentWithoutGradModeIsNoLeaf) {
  for (const Way way : kWays) {
    on_first_and_clean(2, [&](Worker& worker) {
      const at::Tensor a = kind_.make(1), b = kind_.make(2);
      Context context(worker);
      at::Tensor sum;
      {
        const at::NoGradGuard guard;
        EXPECT_THAT(call(way, worker, "worker1", kNeed, a, b), ElementsAre(false, false));
        sum = call(way, worker, "worker1", kAdd, a, b);
      }
      EXPECT_FALSE(sum.requires_grad());
      EXPECT_TRUE(a.requires_grad()) << "the sender's own keeps its flag";
      context.backward(kind_.sum(call(way, worker, "worker1", kAdd, sum, a)));
      EXPECT_EQ(worker.rpc_sync("worker1", kKeys), 0);
      EXPECT_THAT(context.gradients(), SizeIs(1));
      EXPECT_TRUE(context.gradient(a).defined());
    });
  }
}

// peer: dist_autograd_test.py context_cleanup_tensor_with_grad: same (D, S)
TEST_P(AutogradContexts, ContextCleanupTensorWithGrad) {
  on_first_and_clean(2, [&](Worker& worker) {
    const at::Tensor a = kind_.make(1), b = kind_.make(2);
    Context context(worker);
    worker.rpc_sync("worker1", kAdd, a, b);
  });
}

// peer: dist_autograd_test.py context_cleanup_tensor_no_grad: same (D, S)
TEST_P(AutogradContexts, ContextCleanupTensorNoGrad) {
  on_first_and_clean(3, [&](Worker& worker) {
    const at::Tensor a = kind_.make(1, false);
    Context context(worker);
    for (const int rank : {1, 2}) worker.rpc_sync(rank, kAdd, a, a);
  });
}

// peer: dist_autograd_test.py context_cleanup_nested_rpc: better (D, S): `release()` waits for it
TEST_P(AutogradContexts, ContextCleanupNestedRpc) {
  on_first_and_clean(3, [&](Worker& worker) {
    const at::Tensor a = kind_.make(1), b = kind_.make(2);
    Context context(worker);
    worker.rpc_sync("worker1", kNestedAdd, 2, a, b);
    context.release();
    EXPECT_EQ(counts_of(worker).contexts, 0U) << "here, before it returns";
  });
}

/// { Context context(worker); worker.rpc_async(…); }: the end of the context may arrive before the call does.
/// Here every second call is late, and worker 2 reports the end to worker 1.
TEST_P(AutogradContexts, ACallThatTheEndOfItsContextOvertakesIsServed) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Pushes pushes;
    ClusterOptions options = world(3);
    options.seed = seed;
    options.extensions = [&pushes] {
      std::vector<std::unique_ptr<rpc::Extension>> extensions;
      extensions.push_back(std::make_unique<AutogradExtension>());
      extensions.push_back(std::make_unique<StateExtension<Pushes>>(pushes));
      return extensions;
    };
    SimCluster cluster(std::move(options));
    const auto is_call = [](const net::SimMessage& message) {
      const auto header = wire::decode_frame(message.header).header;
      return header.type == wire::MessageType{0x0010} || header.type == wire::MessageType{0x0011};
    };
    cluster.run([&](Worker& worker) {
      if (worker.rank() == 0) {
        std::vector<Future<at::Tensor>> results;
        std::vector<RRef<at::Tensor>> created;
        for (int i = 0; i < 10; ++i) {
          const at::Tensor x = kind_.make(1);
          {
            Context context(worker);
            worker.rpc_sync("worker2", kNestedAdd, 1, x, x);
            if (i % 2 == 1) cluster.network().delay_if(is_call, milliseconds(5));
            results.push_back(worker.rpc_async("worker1", kPush, x));
            created.push_back(worker.remote("worker1", kPush, x));
          }
          cluster.executor().sleep(milliseconds(20));
          cluster.network().delay_if({}, milliseconds(0));
        }
        for (const auto& result : results) expect_equal(result.wait().detach(), kind_.make(1, false) * 2);
        for (const auto& result : created) expect_equal(result.to_here().detach(), kind_.make(1, false) * 2);
        EXPECT_EQ(counts_of(worker).contexts, 0U);
      }
      worker.barrier();
    });
    EXPECT_EQ(pushes.all, 20);
    EXPECT_GE(pushes.without_context, 10) << "all late calls arrived after the end of the context";
    EXPECT_LT(pushes.without_context, 20);
    EXPECT_THAT(pushes.refusal, HasSubstr("in which it was called has ended"));
  }
}

// peer: dist_autograd_test.py context_cleanup_no_tensors: same
TEST(AutogradContexts, ContextCleanupNoTensors) {
  on_first_and_clean(2, [](Worker& worker) {
    Context context(worker);
    worker.rpc_sync("worker1", kConstant, 3);
  });
}

// peer: dist_autograd_test.py (faulty agent) `context_cleanup_tensor_with_grad`, `check_failed_messages`:
//   same
TEST(AutogradContexts, ContextCleanupWhereTheFirstThreeReleasesAreLost) {
  SimCluster cluster(world(3));
  std::atomic<int> lost{0};
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      {
        Context context(worker);
        worker.rpc_sync("worker1", kNestedAdd, 2, Kind(false).make(1), Kind(false).make(2));
        cluster.network().drop_if([&](const net::SimMessage& message) {
          const auto header = wire::decode_frame(message.header).header;
          return header.type == wire::MessageType{0x0103} && lost.fetch_add(1) < 3;
        });
      }
      cluster.executor().sleep(seconds(30));
      cluster.network().drop_if({});
      EXPECT_GT(lost.load(), 3);
    }
    worker.barrier();
    expect_no_contexts(cluster, worker);
  });
}

// peer: dist_autograd_test.py autograd_context: same
TEST(AutogradContexts, AutogradContext) {
  on_all(world(), [](Worker& worker) {
    std::set<std::uint64_t> ids;
    for (int i = 0; i < 200; ++i) {
      std::uint64_t id = 0;
      {
        Context context(worker);
        id = context.id();
        EXPECT_EQ(id >> 48, worker.rank());
        EXPECT_EQ(worker.extension<AutogradExtension>().find(id).id(), id);
      }
      EXPECT_TRUE(ids.insert(id).second) << "this id was used before";
      expect_error(ErrorKind::kInvalid, "has no autograd context",
                   [&] { worker.extension<AutogradExtension>().find(id); });
    }
  });
}

// peer: dist_autograd_test.py nested_context: same
TEST(AutogradContexts, NestedContext) {
  on_first(world(), [](Worker& worker) {
    Context context(worker);
    expect_error(ErrorKind::kInvalid, "already works in autograd context", [&] { Context second(worker); });
  });
}

// peer: dist_autograd_test.py worker_ids_recorded: same
TEST(AutogradContexts, WorkerIdsRecorded) {
  on_first_and_clean(3, [](Worker& worker) {
    const Kind dense(false);
    Context context(worker);
    worker.rpc_sync("worker2", kAdd, dense.make(1, false), dense.make(2, false));
    EXPECT_THAT(ranks_of(context.graph()), ElementsAre(0, 2));
    worker.remote("worker1", kAdd, dense.make(1), dense.make(2)).to_here();
    EXPECT_THAT(ranks_of(context.graph()), ElementsAre(0, 1, 2));
  });
}

// peer: dist_autograd_test.py error_in_context: same
TEST(AutogradContexts, ErrorInContext) {
  on_first_and_clean(2, [](Worker& worker) {
    Context context(worker);
    const at::Tensor a = Kind(false).make(1);
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { worker.rpc_sync("worker1", kRaise, a); });
    context.backward(worker.rpc_sync("worker1", kAdd, a, a).sum());
    expect_equal(context.gradient(a), at::full_like(a, 2).detach());
  });
}

// peer: dist_autograd_test.py debug_info: same
// peer: test_dist_autograd `TestInitializedContextCleanup`, `…SendFunction`: same
TEST(AutogradContexts, DebugInfo) {
  on_first(world(), [](Worker& worker) {
    EXPECT_EQ(counts_of(worker).contexts, 0U);
    Context context(worker);
    const at::Tensor a = Kind(false).make(1);
    const at::Tensor loss = worker.rpc_sync("worker1", kAdd, a, a).sum();
    EXPECT_EQ(counts_of(worker).contexts, 1U);
    std::size_t during = 0;
    a.register_hook([&](const at::Tensor& gradient) {
      during = counts_of(worker).passes;
      return gradient;
    });
    context.backward(loss);
    EXPECT_EQ(during, 1U);
    EXPECT_EQ(counts_of(worker).passes, 0U);
    context.release();
    EXPECT_EQ(counts_of(worker).contexts, 0U);
  });
}

// peer: dist_autograd_test.py thread_local_context_id: same
TEST(AutogradContexts, ThreadLocalContextId) {
  on_first_and_clean(2, [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const auto id = static_cast<std::int64_t>(context.id());
    const auto seen = worker.rpc_async("worker1", kAdd, a, a).then([&](Future<at::Tensor> sum) {
      context.backward(worker.rpc_sync("worker1", kAdd, sum.wait(), a).sum());
      return worker.rpc_sync("worker1", kContextId);
    });
    EXPECT_EQ(seen.wait(), id) << "a continuation works in the context of the thread that added it";
    expect_equal(context.gradient(a), at::full_like(a, 3).detach());
  });
}

/// The peer's fork of TorchScript, whose threads inherit the context; here the program starts the threads.
// peer: dist_autograd_test.py jit_fork_within_context: same, with the program's own threads and a
//   `ContextScope`
TEST(AutogradContexts, JitForkWithinContext) {
  on_first_and_clean(2, [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Context context(worker);
    at::Tensor sum;
    std::int64_t without = -1;
    Thread thread = worker.runtime().executor.spawn("fork", [&] {
      without = worker.rpc_sync("worker1", kContextId);
      autograd::ContextScope scope(context);
      sum = worker.rpc_sync("worker1", kAdd, a, b);
    });
    thread.join();
    EXPECT_EQ(without, 0);
    context.backward(sum.sum());
    expect_equal(context.gradient(a), at::ones_like(a).detach());
  });
}

// peer: dist_autograd_test.py restore_context_after_swtich_to_jit_thread: same, likewise
TEST(AutogradContexts, RestoreContextAfterSwitchToJitThread) {
  on_first_and_clean(2, [](Worker& worker) {
    Context context(worker);
    const auto id = static_cast<std::int64_t>(context.id());
    Thread thread = worker.runtime().executor.spawn("fork", [&] {
      {
        autograd::ContextScope scope(context);
        EXPECT_EQ(worker.rpc_sync("worker1", kContextId), id);
      }
      EXPECT_FALSE(autograd::has_current());
    });
    thread.join();
    EXPECT_EQ(worker.rpc_sync("worker1", kContextId), id);
  });
}

// peer: dist_autograd_test.py (silently) a late call revives a released context: better
TEST(AutogradContexts, AReleasedContextIsNotRevived) {
  on_first_and_clean(2, [](Worker& worker) {
    Context context(worker);
    const at::Tensor a = Kind(false).make(1);
    const at::Tensor loss = worker.rpc_sync("worker1", kAdd, a, a).sum();
    context.release();
    EXPECT_FALSE(worker.rpc_sync("worker1", kAdd, a, a).grad_fn());
    EXPECT_EQ(worker.rpc_sync("worker1", kContextId), 0);
    expect_error(ErrorKind::kInvalid, "was released", [&] { context.backward(loss); });
  });
}

}  // namespace
}  // namespace torchspan::autograd_contexts
