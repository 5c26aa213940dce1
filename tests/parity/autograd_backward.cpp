// Gradients through calls, references and scripts, compared with LibTorch's engine in one process.
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/resolver.h>

#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_backward {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::SizeIs;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor held(Worker& worker, bool sparse) { return Kind(sparse).make(100 + worker.rank()); }
/// Combines two tensors with an operator that this kind of tensors supports.
at::Tensor complex_udf(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor sum = at::add(at::add(a, b), a, 2);
  return a.is_sparse() ? at::add(sum, b, 3) : sum * (a - b).tanh();
}
at::Tensor nested_udf(Worker& worker, const at::Tensor& a, const at::Tensor& b, std::int64_t hops);
at::Tensor add_on(const RRef<at::Tensor>& kept, const at::Tensor& other) {
  return at::add(kept.local_value(), other);
}
/// The caller does not own the value that it fetches.
at::Tensor add_fetched(const RRef<at::Tensor>& kept, const at::Tensor& other) {
  return at::add(kept.to_here(), other);
}
at::Tensor gradient_at(Worker& worker, const RRef<at::Tensor>& kept) {
  return autograd::current(worker).gradient(kept.local_value());
}
Tensors gradients_at(Worker& worker, std::uint64_t context) {
  Tensors gradients;
  for (const auto& [parameter, gradient] : worker.extension<AutogradExtension>().find(context).gradients())
    gradients.push_back(gradient);
  return gradients;
}
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); }
Tensors split_in_two(const at::Tensor& x) { return x.split({2, x.size(0) - 2}); }
Tensors several(const at::Tensor& a, const at::Tensor& b) { return {a * b, a + b, a.detach() * 2, a - b}; }
at::Tensor ignore_second(const at::Tensor& a, const at::Tensor&) { return a * 3; }
at::Tensor backward_inside(Worker& worker, const at::Tensor& a, const at::Tensor& b);

constexpr Function<add> kAdd{"add"};
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<held> kHeld{"held"};
constexpr Function<complex_udf> kComplexUdf{"complex_udf"};
constexpr Function<nested_udf> kNestedUdf{"nested_udf"};
constexpr Function<add_on> kAddOn{"add_on"};
constexpr Function<add_fetched> kAddFetched{"add_fetched"};
constexpr Function<gradient_at> kGradientAt{"gradient_at"};
constexpr Function<gradients_at> kGradientsAt{"gradients_at"};
constexpr Function<matmul> kMatmul{"matmul"};
constexpr Function<split_in_two> kSplit{"split_in_two"};
constexpr Function<several> kSeveral{"several"};
constexpr Function<ignore_second> kIgnoreSecond{"ignore_second"};
constexpr Function<backward_inside> kBackwardInside{"backward_inside"};

at::Tensor nested_udf(Worker& worker, const at::Tensor& a, const at::Tensor& b, std::int64_t hops) {
  if (hops == 0) return at::add(a, b);
  return worker.rpc_sync((worker.rank() + 1) % worker.world_size(), kNestedUdf, a, at::add(b, a), hops - 1);
}
at::Tensor backward_inside(Worker& worker, const at::Tensor& a, const at::Tensor& b) {
  const auto context = autograd::current(worker);
  context.backward(worker.rpc_sync((worker.rank() + 1) % worker.world_size(), kMultiply, a, b).sum());
  return a.detach();
}

ClusterOptions world(int workers = 2) {
  FunctionTable functions;
  functions.add(kAdd, kMultiply, kHeld, kComplexUdf, kNestedUdf, kAddOn, kAddFetched, kGradientAt,
                kGradientsAt, kMatmul, kSplit, kSeveral, kIgnoreSecond, kBackwardInside);
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  unit->define(c10::QualifiedName("script"), "def add(x: Tensor, y: Tensor) -> Tensor:\n    return x + y\n",
               torch::jit::nativeResolver(), nullptr);
  functions.add_script(unit);
  return autograd_world(workers, std::move(functions));
}

class AutogradBackward : public DenseAndSparse {
 protected:
  /// Checks that `remote` gives the gradients of `local`, with every way to call, and leaves `.grad`
  /// unchanged.
  void expect_as_local(int workers, const std::function<at::Tensor(const Tensors&)>& local,
                       const std::function<at::Tensor(Worker&, Way, const Tensors&)>& remote) {
    on_first(world(workers), [&](Worker& worker) {
      for (const Way way : kWays) {
        const Tensors leaves{kind_.make(1), kind_.make(2)};
        const Tensors wanted = expected(kind_, leaves, local);
        Context context(worker);
        context.backward(kind_.sum(remote(worker, way, leaves)));
        for (std::size_t i = 0; i < leaves.size(); ++i) {
          expect_equal(context.gradient(leaves[i]), wanted[i]);
          EXPECT_FALSE(leaves[i].grad().defined());
        }
        EXPECT_THAT(context.gradients(), SizeIs(leaves.size()));
      }
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, AutogradBackward, ::testing::Bool(),
                         [](const auto& run) { return run.param ? "Sparse" : "Dense"; });

// peer: dist_autograd_test.py backward_simple: same (D, S)
TEST_P(AutogradBackward, BackwardSimple) {
  expect_as_local(
      2, [](const Tensors& x) { return at::add(x[0], x[1]); },
      [](Worker& worker, Way way, const Tensors& x) {
        return call(way, worker, "worker1", "aten::add.Tensor", {x[0], x[1]});
      });
}

// peer: dist_autograd_test.py backward_simple_self: same (D, S)
TEST_P(AutogradBackward, BackwardSimpleSelf) {
  expect_as_local(
      1, [](const Tensors& x) { return at::add(x[0], x[1]); },
      [](Worker& worker, Way way, const Tensors& x) { return call(way, worker, 0, kAdd, x[0], x[1]); });
}

// peer: dist_autograd_test.py backward_simple_python_udf: same (D, S)
TEST_P(AutogradBackward, BackwardSimplePythonUdf) {
  expect_as_local(
      2, [](const Tensors& x) { return at::add(x[0], x[1]); },
      [](Worker& worker, Way way, const Tensors& x) { return call(way, worker, 1, kAdd, x[0], x[1]); });
}

// peer: dist_autograd_test.py backward_simple_script_call: same (D, S)
TEST_P(AutogradBackward, BackwardSimpleScriptCall) {
  expect_as_local(
      2, [](const Tensors& x) { return at::add(x[0], x[1]); },
      [](Worker& worker, Way way, const Tensors& x) {
        return call(way, worker, "worker1", "script.add", {x[0], x[1]});
      });
}

// peer: dist_autograd_test.py backward_complex_python_udf: same (D, S)
TEST_P(AutogradBackward, BackwardComplexPythonUdf) {
  expect_as_local(
      2, [](const Tensors& x) { return complex_udf(x[0], x[1]); },
      [](Worker& worker, Way way, const Tensors& x) {
        return call(way, worker, 1, kComplexUdf, x[0], x[1]);
      });
}

// peer: dist_autograd_test.py backwards_nested_python_udf: same (D, S)
TEST_P(AutogradBackward, BackwardsNestedPythonUdf) {
  for (const int hops : {1, 3, 7}) {
    expect_as_local(
        3, [&](const Tensors& x) { return at::add(x[1], x[0], hops + 1); },
        [&](Worker& worker, Way way, const Tensors& x) {
          return call(way, worker, 1, kNestedUdf, x[0], x[1], hops);
        });
  }
}

/// The result of `run(operator, arguments)` on five tensors, with two values used twice.
at::Tensor round_trips(const Kind& kind, const Tensors& x,
                       const std::function<at::Tensor(const std::string&, std::vector<c10::IValue>)>& run) {
  at::Tensor value = run("aten::add.Tensor", {x[0], x[1]});
  value = run("aten::mul.Tensor", {x[2], value});
  const at::Tensor first = run("aten::stack", {Tensors{x[3], value}});
  const at::Tensor second = run("aten::stack", {Tensors{x[4], value}});
  value = run(kind.sparse() ? "aten::mul.Tensor" : "aten::bmm", {first, second});
  return run(kind.sparse() ? "aten::mul.Tensor" : "aten::matmul", {value, value});
}

at::Tensor run_here(const std::string& name, const std::vector<c10::IValue>& args) {
  if (name == "aten::stack") return at::stack(args[0].toTensorVector());
  const at::Tensor a = args[0].toTensor(), b = args[1].toTensor();
  if (name == "aten::add.Tensor") return at::add(a, b);
  if (name == "aten::mul.Tensor") return at::mul(a, b);
  return name == "aten::bmm" ? at::bmm(a, b) : at::matmul(a, b);
}

// peer: dist_autograd_test.py backward_multiple_round_trips: same (D, S): add, mul, stack, bmm and matmul
//   on three workers in turn, two values used twice; over sparse tensors mul for the products
TEST_P(AutogradBackward, BackwardMultipleRoundTrips) {
  on_first(world(4), [&](Worker& worker) {
    Tensors leaves;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) leaves.push_back(kind_.make(seed));
    const Tensors wanted =
        expected(kind_, leaves, [&](const Tensors& x) { return round_trips(kind_, x, run_here); });
    for (const Way way : kWays) {
      int trips = 0;
      Context context(worker);
      context.backward(kind_.sum(round_trips(kind_, leaves, [&](const std::string& name, const auto& args) {
        return call(way, worker, 1 + trips++ % 3, name, args);
      })));
      for (std::size_t i = 0; i < leaves.size(); ++i) expect_equal(context.gradient(leaves[i]), wanted[i]);
      EXPECT_THAT(context.gradients(), SizeIs(leaves.size()));
    }
  });
}

// peer: dist_autograd_test.py backward_without_rpc: same (D, S)
TEST_P(AutogradBackward, BackwardWithoutRpc) {
  expect_as_local(
      1, [](const Tensors& x) { return complex_udf(x[0], x[1]); },
      [](Worker&, Way, const Tensors& x) { return complex_udf(x[0], x[1]); });
}

// peer: dist_autograd_test.py `grad_only_on_return_value`(`_remote`): same (D, S)
TEST_P(AutogradBackward, GradOnlyOnReturnValue) {
  on_first(world(), [&](Worker& worker) {
    for (const Way way : kWays) {
      Context context(worker);
      context.backward(kind_.sum(call(way, worker, "worker1", kHeld, kind_.sparse())));
      const Tensors gradients = worker.rpc_sync("worker1", kGradientsAt, context.id());
      ASSERT_THAT(gradients, SizeIs(1));
      const at::Tensor ones = expected(kind_, {kind_.make(101)}, [](const Tensors& x) { return x[0]; })[0];
      expect_equal(gradients[0], ones);
      EXPECT_THAT(context.gradients(), SizeIs(0));
    }
  });
}

// peer: dist_autograd_test.py backward_no_grad_on_tensor: same (D, S)
TEST_P(AutogradBackward, BackwardNoGradOnTensor) {
  on_first(world(), [&](Worker& worker) {
    const at::Tensor a = kind_.make(1), b = kind_.make(2);
    Context context(worker);
    const at::Tensor loss = kind_.sum(worker.rpc_sync("worker1", kAdd, a, b));
    context.backward(loss, {.retain_graph = true});
    EXPECT_FALSE(a.grad().defined());
    EXPECT_FALSE(b.grad().defined());
    kind_.sum(at::add(a, b)).backward();
    const at::Tensor before = a.grad().clone();
    context.backward(loss);
    expect_equal(a.grad(), before);
  });
}

// peer: dist_autograd_test.py backward_rref: same (D, S)
TEST_P(AutogradBackward, BackwardRref) {
  on_first(world(), [&](Worker& worker) {
    const auto kept = worker.remote("worker1", kHeld, kind_.sparse());
    const at::Tensor other = kind_.make(2);
    const Tensors wanted =
        expected(kind_, {kind_.make(101), other}, [](const Tensors& x) { return at::add(x[0], x[1]); });
    Context context(worker);
    context.backward(kind_.sum(kept.rpc_sync(kAddOn, other)));
    expect_equal(kept.rpc_sync(kGradientAt), wanted[0]);
    expect_equal(context.gradient(other), wanted[1]);
  });
}

// peer: dist_autograd_test.py backward_rref_multi: same (D, S)
TEST_P(AutogradBackward, BackwardRrefMulti) {
  on_first(world(3), [&](Worker& worker) {
    const auto first = worker.remote("worker1", kHeld, kind_.sparse());
    const auto second = worker.remote("worker2", kHeld, kind_.sparse());
    const Tensors wanted = expected(kind_, {kind_.make(101), kind_.make(102)},
                                    [](const Tensors& x) { return at::add(at::add(x[0], x[1]), x[0]); });
    Context context(worker);
    const at::Tensor a = first.to_here(), b = second.to_here();
    const at::Tensor sum = at::add(worker.rpc_sync("worker2", kAdd, a, b), first.to_here());
    context.backward(kind_.sum(sum));
    expect_equal(first.rpc_sync(kGradientAt), wanted[0]);
    expect_equal(second.rpc_sync(kGradientAt), wanted[1]);
  });
}

// peer: dist_autograd_test.py backward_rref_nested: same (D, S)
TEST_P(AutogradBackward, BackwardRrefNested) {
  on_first(world(3), [&](Worker& worker) {
    for (const Way way : kWays) {
      const auto kept = worker.remote("worker1", kHeld, kind_.sparse());
      const at::Tensor other = kind_.make(2);
      const Tensors wanted =
          expected(kind_, {kind_.make(101), other}, [](const Tensors& x) { return at::add(x[0], x[1]); });
      Context context(worker);
      context.backward(kind_.sum(call(way, worker, "worker2", kAddFetched, kept, other)));
      expect_equal(kept.rpc_sync(kGradientAt), wanted[0]);
      expect_equal(context.gradient(other), wanted[1]);
    }
  });
}

// peer: dist_autograd_test.py backward_multiple_roots: same (D, S)
TEST_P(AutogradBackward, BackwardMultipleRoots) {
  on_first(world(), [&](Worker& worker) {
    const Tensors leaves{kind_.make(1), kind_.make(2)};
    const Tensors wanted = expected(
        kind_, leaves, [](const Tensors& x) { return at::add(at::add(x[0], x[1]), at::add(x[1], x[0], 5)); });
    Context context(worker);
    const at::Tensor first = kind_.sum(worker.rpc_sync("worker1", kAdd, leaves[0], leaves[1]));
    const at::Tensor second =
        kind_.sum(at::add(worker.rpc_sync("worker1", kAdd, leaves[1], leaves[0]), leaves[0], 4));
    context.backward(Tensors{first, second});
    for (int i = 0; i < 2; ++i) expect_equal(context.gradient(leaves[i]), wanted[i]);
  });
}

// peer: dist_autograd_test.py backward_different_dtypes: same (D, S)
TEST_P(AutogradBackward, BackwardDifferentDtypes) {
  on_first(world(), [&](Worker& worker) {
    const at::Tensor a = kind_.make(1).detach().to(at::kFloat).set_requires_grad(true), b = kind_.make(2);
    const Tensors wanted = expected(kind_, {a, b}, [](const Tensors& x) { return at::add(x[0], x[1]); });
    for (const Way way : kWays) {
      Context context(worker);
      const at::Tensor sum = call(way, worker, "worker1", kAdd, a, b);
      EXPECT_EQ(sum.scalar_type(), at::kDouble);
      context.backward(kind_.sum(sum));
      EXPECT_EQ(context.gradient(a).scalar_type(), at::kFloat);
      EXPECT_EQ(context.gradient(b).scalar_type(), at::kDouble);
      expect_equal(context.gradient(a), wanted[0]);
      expect_equal(context.gradient(b), wanted[1]);
    }
  });
}

// peer: dist_autograd_test.py backward_accumulate_grads: same (D, S)
TEST_P(AutogradBackward, BackwardAccumulateGrads) {
  on_first(world(), [&](Worker& worker) {
    const Tensors leaves{kind_.make(1), kind_.make(2)};
    const Tensors once = expected(kind_, leaves, [](const Tensors& x) { return complex_udf(x[0], x[1]); });
    Context context(worker);
    const at::Tensor loss = kind_.sum(worker.rpc_sync("worker1", kComplexUdf, leaves[0], leaves[1]));
    context.backward(loss, {.retain_graph = true});
    context.backward(loss);
    for (int i = 0; i < 2; ++i) expect_equal(context.gradient(leaves[i]), at::mul(once[i], 2));
  });
}

// peer: dist_autograd_test.py nested_backward_accumulate_grads: same (D, S)
TEST_P(AutogradBackward, NestedBackwardAccumulateGrads) {
  on_first(world(3), [&](Worker& worker) {
    const Tensors leaves{kind_.make(1), kind_.make(2)};
    Context context(worker);
    const at::Tensor value = worker.rpc_sync("worker1", kNestedUdf, leaves[0], leaves[1], 2);
    const Tensors once = expected(kind_, leaves, [](const Tensors& x) { return at::add(x[1], x[0], 3); });
    for (int pass = 0; pass < 2; ++pass) context.backward(kind_.sum(value), {.retain_graph = true});
    for (int i = 0; i < 2; ++i) expect_equal(context.gradient(leaves[i]), at::mul(once[i], 2));
  });
}

// peer: dist_autograd_test.py multiple_backward: same (D, S): 1,000 passes
TEST_P(AutogradBackward, MultipleBackward) {
  ClusterOptions options = world();
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const Tensors leaves{kind_.make(1), kind_.make(2)};
    const Tensors once = expected(kind_, leaves, [](const Tensors& x) { return at::add(x[0], x[1], 3); });
    Context context(worker);
    const at::Tensor loss = kind_.sum(worker.rpc_sync("worker1", kAdd, leaves[0], at::mul(leaves[1], 3)));
    constexpr int kPasses = 1000;
    for (int pass = 0; pass < kPasses; ++pass) context.backward(loss, {.retain_graph = true});
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(context.gradient(leaves[i]).to_dense(), at::mul(once[i], kPasses).to_dense()));
    }
  });
}

// peer: dist_autograd_test.py backward_different_tensor_dims: same
TEST(AutogradBackward, BackwardDifferentTensorDims) {
  on_first(world(), [](Worker& worker) {
    const auto leaf = [](std::vector<std::int64_t> sizes) {
      return at::randn(sizes, at::kDouble).set_requires_grad(true);
    };
    const at::Tensor a = leaf({4, 6}), b = leaf({6, 5}), c = leaf({5, 7}), d = leaf({7, 9});
    at::matmul(at::matmul(at::matmul(a, b), c), d).sum().backward();
    Tensors wanted;
    for (const at::Tensor& x : {a, b, c, d}) {
      wanted.push_back(x.grad().clone());
      x.mutable_grad() = at::Tensor();
    }
    for (const Way way : kWays) {
      Context context(worker);
      const at::Tensor ab = call(way, worker, "worker1", kMatmul, a, b);
      const at::Tensor abc = call(way, worker, "worker1", "aten::matmul", {ab, c});
      context.backward(call(way, worker, "worker1", kMatmul, abc, d).sum());
      const Tensors all{a, b, c, d};
      for (std::size_t i = 0; i < 4; ++i) expect_equal(context.gradient(all[i]), wanted[i]);
    }
  });
}

// peer: dist_autograd_test.py backward_unused_tensors: better: a parameter that feeds only unused outputs
//   gets no gradient, as in one process
TEST(AutogradBackward, BackwardUnusedTensors) {
  on_first(world(), [](Worker& worker) {
    const Kind kind(false);
    for (const Way way : kWays) {
      const at::Tensor a = kind.make(1), b = kind.make(2), c = kind.make(3);
      Context context(worker);
      const at::Tensor stacked = call(way, worker, "worker1", "aten::stack", {Tensors{a, b, c}});
      context.backward(at::matmul(stacked[0], stacked[1]).sum());
      const Tensors wanted = expected(kind, {a, b}, [](const Tensors& x) { return at::matmul(x[0], x[1]); });
      expect_equal(context.gradient(a), wanted[0]);
      expect_equal(context.gradient(b), wanted[1]);
      expect_equal(context.gradient(c), at::zeros_like(c).detach());
    }
  });
}

// peer: dist_autograd_test.py backward_multiple_output_tensors: same
TEST(AutogradBackward, BackwardMultipleOutputTensors) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor x = at::randn({5, 4}, at::kDouble).set_requires_grad(true);
    for (const Way way : kWays) {
      Context context(worker);
      const Tensors parts = call(way, worker, "worker1", kSplit, x);
      context.backward((parts[0].sin().sum() * parts[1].sum()));
      const auto y = x.detach().clone().set_requires_grad(true);
      const Tensors local = split_in_two(y);
      (local[0].sin().sum() * local[1].sum()).backward();
      expect_equal(context.gradient(x), y.grad());
    }
  });
}

// peer: dist_autograd_test.py backward_unused_tensors
TEST(AutogradBackward, OutputsThatAreNotUsedAreNotZerosButNothing) {
  on_first(world(), [](Worker& worker) {
    const Kind kind(false);
    const at::Tensor a = kind.make(1), b = kind.make(2);
    Context context(worker);
    const Tensors parts = worker.rpc_sync("worker1", kSeveral, a, b);
    EXPECT_FALSE(parts[2].requires_grad());
    context.backward((parts[1] * worker.rpc_sync("worker1", kIgnoreSecond, a, b)).sum());
    const Tensors wanted =
        expected(kind, {a, b}, [](const Tensors& x) { return (x[0] + x[1]) * (x[0] * 3); });
    expect_equal(context.gradient(a), wanted[0]);
    expect_equal(context.gradient(b), wanted[1]);
    const at::Tensor c = kind.make(3);
    context.backward(worker.rpc_sync("worker1", kIgnoreSecond, a, c).sum());
    EXPECT_FALSE(context.gradient(c).defined());
  });
}

// peer: dist_autograd_test.py (documented) backward from a handler: same
TEST(AutogradBackward, BackwardFromInsideAHandler) {
  on_first(world(3), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Context context(worker);
    worker.rpc_sync("worker1", kBackwardInside, a, b);
    expect_equal(context.gradient(a), b.detach());
    expect_equal(context.gradient(b), a.detach());
  });
}

// peer: dist_autograd_test.py backward_invalid_args: same
TEST(AutogradBackward, BackwardInvalidArgs) {
  on_first(world(), [](Worker& worker) {
    Context context(worker);
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    const auto refused = [&](const std::string& text, const Tensors& roots) {
      expect_error(ErrorKind::kInvalid, text, [&] { context.backward(roots); });
    };
    refused("is a scalar", {at::add(a, b)});
    refused("does not require grad", {a.detach().sum()});
    refused("no root", {});
    refused("is undefined", {at::Tensor()});
    context.backward(at::add(a, b).sum());
  });
}

// peer: dist_autograd_test.py backward_without_context: same
TEST(AutogradBackward, BackwardWithoutContext) {
  on_first(world(), [](Worker& worker) {
    expect_error(ErrorKind::kInvalid, "has no autograd context",
                 [&] { worker.extension<AutogradExtension>().find(100); });
    expect_error(ErrorKind::kInvalid, "no autograd context", [&] { autograd::current(worker); });
  });
}

// peer: dist_autograd_test.py async_dist_autograd: same: sixty threads at one worker, simulated and, in
//   real processes, at the same time
TEST(AutogradBackward, AsyncDistAutograd) {
  on_first(world(), [](Worker& worker) {
    std::vector<Thread> threads;
    std::atomic<int> right{0};
    for (int i = 0; i < 60; ++i) {
      threads.push_back(worker.runtime().executor.spawn("trainer", [&, i] {
        const at::Tensor a = Kind(false).make(i), b = Kind(false).make(i + 100);
        Context context(worker);
        at::Tensor sum = worker.rpc_sync("worker1", kMultiply, a, b);
        for (int hop = 0; hop < 3; ++hop) sum = worker.rpc_sync("worker1", kAdd, sum, a);
        context.backward(sum.sum());
        if (at::allclose(context.gradient(a), (b + 3).detach()) &&
            at::allclose(context.gradient(b), a.detach())) {
          ++right;
        }
      }));
    }
    for (Thread& thread : threads) thread.join();
    EXPECT_EQ(right.load(), 60);
  });
}

}  // namespace
}  // namespace torchspan::autograd_backward
