// Failures in a backward pass: each one ends the pass on all workers at once, with the same error.
#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_failures {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }

struct Simulated : torch::autograd::Function<Simulated> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw std::runtime_error("Simulate error on backward pass");
  }
};
at::Tensor simulated(const at::Tensor& x) { return Simulated::apply(x); }

/// Waits for a second in its backward.
struct Slow : torch::autograd::Function<Slow> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Worker& worker) {
    context->saved_data["worker"] = reinterpret_cast<std::int64_t>(&worker.runtime());
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto& runtime = *reinterpret_cast<Runtime*>(context->saved_data.at("worker").toInt());
    runtime.executor.sleep(seconds(1));
    return {gradients[0], at::Tensor()};
  }
};
at::Tensor slow(Worker& worker, const at::Tensor& x) { return Slow::apply(x, worker); }

/// x, with a hook on its gradient that throws.
at::Tensor hooked(const at::Tensor& x) {
  at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::out_of_range("the hook threw"); });
  return y;
}

/// Calls another worker in its backward.
void refuse(const std::string& text) { throw std::domain_error(text); }
struct Asks : torch::autograd::Function<Asks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Worker& worker) {
    context->saved_data["worker"] = reinterpret_cast<std::int64_t>(&worker);
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list&);
};

/// Calls the next worker, and so on; the last one does `what`.
at::Tensor chain(Worker& worker, const at::Tensor& x, std::int64_t hops, const std::string& what);
std::int64_t running(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).passes); }

constexpr Function<add> kAdd{"add"};
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<simulated> kSimulated{"simulated"};
constexpr Function<slow> kSlow{"slow"};
constexpr Function<hooked> kHooked{"hooked"};
constexpr Function<refuse> kRefuse{"refuse"};
constexpr Function<chain> kChain{"chain"};
constexpr Function<running> kRunning{"running"};

variable_list Asks::backward(AutogradContext* context, const variable_list&) {
  reinterpret_cast<Worker*>(context->saved_data.at("worker").toInt())
      ->rpc_sync("worker0", kRefuse, "no such thing");
  return {};
}

at::Tensor chain(Worker& worker, const at::Tensor& x, std::int64_t hops, const std::string& what) {
  if (hops > 0) {
    const auto next = (worker.rank() + 1) % worker.world_size();
    return worker.rpc_sync(next, kChain, x.sin(), hops - 1, what) + x;
  }
  if (what == "fail") return simulated(x) + x;
  if (what == "slow") return slow(worker, x) + x;
  if (what == "hook") return hooked(x) + x;
  if (what == "ask") return Asks::apply(x, worker) + x;
  return x * 2;
}

ClusterOptions world(int workers = 2) {
  return autograd_world(
      workers, FunctionTable().add(kAdd, kMultiply, kSimulated, kSlow, kHooked, kRefuse, kChain, kRunning));
}

/// Waits until no worker runs a pass.
void expect_all_free(const Worker& worker) {
  for (const WorkerInfo& other : worker.workers()) {
    EXPECT_EQ(worker.rpc_sync(other, kRunning), 0) << other.name;
  }
}

// peer: dist_autograd_test.py backward_autograd_engine_error: better: names worker, node and call site, and
//   no worker is left waiting
TEST(AutogradFailures, BackwardAutogradEngineError) {
  on_first(world(4), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Context context(worker);
    at::Tensor value = worker.rpc_sync("worker1", kAdd, a, b);
    value = worker.rpc_sync("worker2", kMultiply, value, b);
    const int line = __LINE__ + 1;
    value = worker.rpc_sync("worker3", kSimulated, value);
    value = worker.rpc_sync("worker1", kMultiply, value, a);
    const TimePoint begin = now(worker);
    const Error error = error_of([&] { context.backward(value.sum()); });
    EXPECT_LT(now(worker) - begin, seconds(1));
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    EXPECT_THAT(error.message(), AllOf(HasSubstr("Simulate error on backward pass"), HasSubstr("'worker3'"),
                                       HasSubstr("Simulated"), HasSubstr("the result of 'simulated'")));
    EXPECT_THAT(error.message(), HasSubstr("autograd_failures.cpp:" + std::to_string(line)));
    expect_all_free(worker);
  });
}

// peer: dist_autograd_test.py backward_python_udf_error: better: one error, without a prefix for every hop
TEST(AutogradFailures, BackwardPythonUdfError) {
  on_first(world(3), [](Worker& worker) {
    for (const std::int64_t hops : {0, 1, 4}) {
      const at::Tensor a = Kind(false).make(1);
      Context context(worker);
      const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, hops, "fail").sum();
      const std::string there = "worker" + std::to_string((1 + hops) % 3);
      const Error error = error_of([&] { context.backward(loss); });
      EXPECT_THAT(error.message(), AllOf(HasSubstr("Simulate error on backward pass"),
                                         HasSubstr("on worker '" + there + "'"), HasSubstr("'chain'")));
      EXPECT_EQ(error.frames().size(), 1U) << "one frame, not one per hop";
      expect_all_free(worker);
    }
  });
}

/// If a hook, or a call made in backward, throws anywhere: one error with the worker, the node and the call
/// of the forward pass.
// peer: dist_autograd_test.py (undocumented) a hook, or a call made in backward, throws: better: names
//   worker, node and the forward call
TEST(AutogradFailures, HooksAndNestedCallsThatThrow) {
  on_first(world(4), [](Worker& worker) {
    const std::pair<const char*, const char*> kinds[] = {{"hook", "the hook threw"},
                                                         {"ask", "no such thing"}};
    for (const auto& [what, text] : kinds) {
      for (const std::int64_t hops : {0, 2}) {
        const at::Tensor a = Kind(false).make(1);
        Context context(worker);
        const int line = __LINE__ + 1;
        const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, hops, what).sum();
        const TimePoint begin = now(worker);
        const Error error = error_of([&] { context.backward(loss, {.retain_graph = true}); });
        EXPECT_LT(now(worker) - begin, seconds(1));
        EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure) << error.what();
        EXPECT_THAT(error.message(), AllOf(HasSubstr(text), HasSubstr("'chain'"),
                                           HasSubstr("on worker 'worker" + std::to_string(1 + hops) + "'"),
                                           HasSubstr("failed in node '")));
        if (hops == 0) {
          EXPECT_THAT(error.message(), HasSubstr("autograd_failures.cpp:" + std::to_string(line)));
        }
        expect_all_free(worker);
      }
    }
  });
}

// peer: dist_autograd_test.py (none) cancellation of a pass: more
TEST(AutogradFailures, ACancelledPassEndsEverywhere) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, 1, "slow").sum();
    std::stop_source source;
    Thread thread = worker.runtime().executor.spawn("canceller", [&] {
      nap(worker, milliseconds(100));
      source.request_stop();
    });
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kCancelled, "the program cancelled this backward pass",
                 [&] { context.backward(loss, {.retain_graph = true, .stop = source.get_token()}); });
    EXPECT_LT(now(worker) - begin, milliseconds(500)) << "it did not wait for the slow node";
    expect_all_free(worker);
    thread.join();
    expect_error(ErrorKind::kCancelled, "the program cancelled",
                 [&] { context.backward(loss, {.retain_graph = true, .stop = source.get_token()}); });
    nap(worker, seconds(2));
    context.backward(loss);
    EXPECT_TRUE(context.gradient(a).defined());
  });
}

// peer: dist_autograd_test.py multiple_backward_with_errors: same: 50 passes that fail, then 50 that succeed
TEST(AutogradFailures, MultipleBackwardWithErrors) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Context context(worker);
    const at::Tensor bad = worker.rpc_sync("worker1", kChain, a, 2, "fail").sum();
    for (int pass = 0; pass < 50; ++pass) {
      expect_error(ErrorKind::kInvalid, "Simulate error on backward pass",
                   [&] { context.backward(bad, {.retain_graph = true}); });
    }
    const at::Tensor good = worker.rpc_sync("worker1", kMultiply, b, b * 3).sum();
    for (int pass = 0; pass < 50; ++pass) context.backward(good, {.retain_graph = true});
    EXPECT_TRUE(at::allclose(context.gradient(b), (b * 300).detach()));
    expect_all_free(worker);
  });
}

/// FAST: PyTorch's own test asserts that this hangs.
// peer: dist_autograd_test.py backward_unused_send_function: better: the peer's test asserts a hang; FAST
//   names the unused sends of all workers, SMART gives the right gradients
TEST(AutogradFailures, BackwardUnusedSendFunction) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    {
      Context context(worker);
      const int line = __LINE__ + 1;
      worker.rpc_sync("worker2", kMultiply, a, b);
      const at::Tensor used = worker.rpc_sync("worker1", kAdd, a, b);
      const TimePoint begin = now(worker);
      const Error error = error_of([&] { context.backward(used.sum(), {.mode = PassMode::kFast}); });
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
      EXPECT_THAT(error.message(), AllOf(HasSubstr("kSmart"), HasSubstr("'multiply'"),
                                         HasSubstr("worker 'worker2' sent the result"),
                                         HasSubstr("worker 'worker0' sent arguments"),
                                         HasSubstr("autograd_failures.cpp:" + std::to_string(line))));
      EXPECT_THAT(error.message(), Not(HasSubstr("'add'"))) << "its gradients came";
      EXPECT_LT(now(worker) - begin, seconds(4));
      expect_all_free(worker);
    }
    Context context(worker);
    worker.rpc_sync("worker2", kMultiply, a, b);
    context.backward(worker.rpc_sync("worker1", kAdd, a, b).sum());
    expect_equal(context.gradient(a), at::ones_like(a).detach());
  });
}

// peer: dist_autograd_test.py backward_unused_send_function
TEST(AutogradFailures, SlowWorkIsNoStall) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, 1, "slow").sum();
    context.backward(loss, {.mode = PassMode::kFast, .stall = milliseconds(20)});
    EXPECT_TRUE(context.gradient(a).defined());
  });
}

TEST(AutogradFailures, ThreadsThatNoPassCanHave) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kAdd, a, a).sum();
    for (const unsigned threads : {0U, 65U}) {
      expect_error(ErrorKind::kInvalid, "BackwardOptions::threads is " + std::to_string(threads),
                   [&] { context.backward(loss, {.threads = threads}); });
    }
    context.backward(loss, {.threads = 3});
    EXPECT_TRUE(context.gradient(a).defined());
  });
}

// peer: dist_autograd_test.py (hangs) a pass that is late: better
TEST(AutogradFailures, APassThatIsLateEndsEverywhere) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, 1, "slow").sum();
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kTimedOut, "'chain'",
                 [&] { context.backward(loss, {.retain_graph = true, .timeout = milliseconds(100)}); });
    EXPECT_LT(now(worker) - begin, milliseconds(900)) << "it did not wait for the slow node";
    expect_all_free(worker);
    nap(worker, seconds(2));
    context.backward(loss);
    EXPECT_TRUE(context.gradient(a).defined());
  });
}

// peer: dist_autograd_test.py (asserts) two passes at once in one context: better: the second is rejected
TEST(AutogradFailures, TwoPassesAtOnceInOneContext) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, 1, "slow").sum();
    Thread thread = worker.runtime().executor.spawn("second", [&] {
      nap(worker, milliseconds(10));
      expect_error(ErrorKind::kInvalid, "already runs in autograd context", [&] { context.backward(loss); });
    });
    context.backward(loss);
    thread.join();
    EXPECT_TRUE(context.gradient(a).defined());
    expect_all_free(worker);
  });
}

// peer: dist_autograd_test.py clean_context_during_backward: better: the pass ends with an error
TEST(AutogradFailures, CleanContextDuringBackward) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, 1, "slow").sum();
    Thread thread = worker.runtime().executor.spawn("cleaner", [&] {
      nap(worker, milliseconds(10));
      context.release();
    });
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kCancelled, "released while its backward pass ran",
                 [&] { context.backward(loss); });
    EXPECT_LT(now(worker) - begin, milliseconds(900));
    thread.join();
    expect_all_free(worker);
    EXPECT_EQ(counts_of(worker).contexts, 0U);
  });
}

/// Kills `victim` while a pass runs; the caller and all others get an error within a second.
void expect_death_to_end_a_pass(int victim, const std::string& what) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    ClusterOptions options = world(4);
    options.graceful = false;
    options.seed = seed;
    SimCluster cluster(std::move(options));
    cluster.run([&](Worker& worker) {
      if (static_cast<int>(worker.rank()) == victim) return nap(worker, seconds(20));
      if (worker.rank() != 0) {
        nap(worker, seconds(10));
        EXPECT_EQ(counts_of(worker).passes, 0U) << "seed " << seed;
        return nap(worker, seconds(5));
      }
      const at::Tensor a = Kind(false).make(1);
      Context context(worker);
      const at::Tensor loss = worker.rpc_sync("worker1", kChain, a, 2, what).sum();
      std::vector<Thread> killers;
      if (what == "slow") {
        killers.push_back(worker.runtime().executor.spawn("killer", [&] {
          nap(worker, milliseconds(100));
          cluster.kill(victim);
        }));
      } else {
        cluster.kill(victim);
      }
      const TimePoint begin = now(worker);
      const Error error = error_of([&] { context.backward(loss); });
      EXPECT_LT(now(worker) - begin, seconds(1)) << "seed " << seed;
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      EXPECT_THAT(error.message(), AllOf(HasSubstr("'worker" + std::to_string(victim) + "'"),
                                         HasSubstr("'chain'"), HasSubstr("autograd_failures.cpp:")));
      nap(worker, seconds(10));
    });
  }
}

// peer: dist_autograd_test.py backward_node_failure: better: an error within a second
TEST(AutogradFailures, BackwardNodeFailure) { expect_death_to_end_a_pass(2, ""); }
// peer: dist_autograd_test.py backward_node_failure_python_udf: better
TEST(AutogradFailures, BackwardNodeFailurePythonUdf) {
  for (const int victim : {1, 2, 3}) expect_death_to_end_a_pass(victim, "slow");
}

}  // namespace
}  // namespace torchspan::autograd_failures
