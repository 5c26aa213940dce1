// The roots of a pass: losses behind references, roots of any shape with their gradients; and a new start,
// without gradients, after a failed pass.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_roots {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor held(Worker& worker, bool sparse) { return Kind(sparse).make(100 + worker.rank()); }
at::Tensor held_scalar() { return at::ones({}, at::kDouble).set_requires_grad(true); }
/// A loss of the caller's tensor and of one on this worker.
at::Tensor loss_with(const RRef<at::Tensor>& kept, const at::Tensor& a) {
  const at::Tensor sum = at::add(kept.local_value(), a, 3);
  return Kind(a.is_sparse()).sum(sum);
}
at::Tensor gradient_at(Worker& worker, const RRef<at::Tensor>& kept) {
  return autograd::current(worker).gradient(kept.local_value());
}
at::Tensor late(Worker& worker, const at::Tensor& a) {
  nap(worker, seconds(5));
  return a.sum();
}
at::Tensor own_slow(Worker& worker) {
  return sleeps_in_backward(Kind(false).make(5) * 2, worker.runtime(), seconds(5));
}
at::Tensor refuse(const at::Tensor&) { throw std::domain_error("no loss today"); }
at::Tensor without_graph(const at::Tensor& a) { return a.detach().sum(); }

/// Returns a; its backward fails `failures` times.
struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, std::int64_t failures) {
    context->saved_data["left"] = failures;
    return a.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::int64_t left = context->saved_data["left"].toInt();
    context->saved_data["left"] = left - 1;
    if (left > 0) throw std::runtime_error("not this time");
    return {gradients[0], at::Tensor()};
  }
};
at::Tensor fails(const at::Tensor& a, std::int64_t failures) { return Fails::apply(a, failures); }
/// Calls the owner of `kept`, of which its caller knows nothing.
at::Tensor add_there(Worker& worker, std::int64_t to, const RRef<at::Tensor>& kept, const at::Tensor& a);
at::Tensor times_kept(const RRef<at::Tensor>& kept, const at::Tensor& a) { return kept.local_value() * a; }
std::int64_t keys(Worker& worker) {
  return static_cast<std::int64_t>(autograd::current(worker).gradients().size());
}

constexpr Function<add> kAdd{"add"};
constexpr Function<held> kHeld{"held"};
constexpr Function<held_scalar> kHeldScalar{"held_scalar"};
constexpr Function<loss_with> kLossWith{"loss_with"};
constexpr Function<gradient_at> kGradientAt{"gradient_at"};
constexpr Function<late> kLate{"late"};
constexpr Function<own_slow> kOwnSlow{"own_slow"};
constexpr Function<refuse> kRefuse{"refuse"};
constexpr Function<without_graph> kWithoutGraph{"without_graph"};
constexpr Function<fails> kFails{"fails"};
constexpr Function<add_there> kAddThere{"add_there"};
constexpr Function<times_kept> kTimesKept{"times_kept"};
constexpr Function<keys> kKeys{"keys"};

at::Tensor add_there(Worker& worker, std::int64_t to, const RRef<at::Tensor>& kept, const at::Tensor& a) {
  return worker.rpc_sync(to, kTimesKept, kept, a) + a;
}

ClusterOptions world(int workers = 2) {
  return autograd_world(workers,
                        FunctionTable().add(kAdd, kHeld, kHeldScalar, kLossWith, kGradientAt, kLate, kRefuse,
                                            kWithoutGraph, kFails, kAddThere, kTimesKept, kKeys, kOwnSlow));
}

std::vector<std::int64_t> all_keys(const Worker& worker) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < worker.world_size(); ++rank) {
    counts.push_back(worker.rpc_sync(rank, kKeys));
  }
  return counts;
}

class AutogradRoots : public DenseAndSparse {};
INSTANTIATE_TEST_SUITE_P(Kinds, AutogradRoots, ::testing::Bool(),
                         [](const auto& run) { return run.param ? "Sparse" : "Dense"; });

// peer: rpc_test.py/rref owner_rref_backward, user_rref_backward: differs (D, S): `context.backward(rref)`
//   fetches the loss and begins the pass on the caller, not on the owner; gradients go to the context,
//   never to `.grad`
TEST_P(AutogradRoots, OwnerRrefBackward) {
  on_first(world(), [&](Worker& worker) {
    const at::Tensor a = kind_.make(1), b = kind_.make(2);
    const Tensors wanted = expected(kind_, {a, b}, [](const Tensors& x) { return at::add(x[0], x[1], 3); });
    Context context(worker);
    const RRef<at::Tensor> here(worker, kind_.sum(at::add(a, b, 3)));
    context.backward(here, {.retain_graph = true});
    context.backward(here);
    expect_equal(context.gradient(a), at::mul(wanted[0], 2));
    expect_equal(context.gradient(b), at::mul(wanted[1], 2));
    EXPECT_FALSE(a.grad().defined());
    const RRef<at::Tensor> of_others(worker, kind_.sum(worker.rpc_sync("worker1", kAdd, a, b)));
    context.backward(of_others);
    expect_equal(context.gradient(a), at::mul(wanted[0], 3));
  });
}

// peer: rpc_test.py/rref owner_rref_backward
TEST_P(AutogradRoots, UserRrefBackward) {
  on_first(world(3), [&](Worker& worker) {
    const auto kept = worker.remote("worker1", kHeld, kind_.sparse());
    const at::Tensor a = kind_.make(2);
    const Tensors wanted =
        expected(kind_, {kind_.make(101), a}, [](const Tensors& x) { return at::add(x[0], x[1], 3); });
    Context context(worker);
    const RRef<at::Tensor> loss = kept.remote(kLossWith, a);
    for (int pass = 1; pass <= 3; ++pass) {
      context.backward(loss, {.retain_graph = pass < 3});
      expect_equal(kept.rpc_sync(kGradientAt), at::mul(wanted[0], pass));
      expect_equal(context.gradient(a), at::mul(wanted[1], pass));
    }
    EXPECT_FALSE(a.grad().defined());
  });
}

// peer: rpc_test.py/rref owner_rref_backward
TEST(AutogradRoots, AnRrefIsFetchedInTheContextOfAnyCaller) {
  on_first(world(), [](Worker& worker) {
    const auto kept = worker.remote("worker1", kHeld, false);
    const at::Tensor a = Kind(false).make(2);
    Context context(worker);
    const RRef<at::Tensor> loss = kept.remote(kLossWith, a);
    Thread thread = worker.runtime().executor.spawn("outside", [&] {
      context.backward(loss, {.mode = PassMode::kFast});
      EXPECT_FALSE(autograd::has_current());
    });
    thread.join();
    expect_equal(context.gradient(a), at::full_like(a, 3).detach());
  });
}

// peer: rpc_test.py/rref owner_rref_backward
TEST(AutogradRoots, RrefsThatAreNoLossAreRefused) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const auto refused = [&](ErrorKind kind, const std::string& text, const RRef<at::Tensor>& root) {
      expect_error(kind, text, [&] { context.backward(root, {.timeout = seconds(1)}); });
    };
    refused(ErrorKind::kInvalid, "RRef", RRef<at::Tensor>());
    refused(ErrorKind::kInvalid, "has 9 elements", RRef<at::Tensor>(worker, a * 2));
    refused(ErrorKind::kInvalid, "does not require grad", RRef<at::Tensor>(worker, a.detach().sum()));
    refused(ErrorKind::kInvalid, "is undefined", RRef<at::Tensor>(worker, at::Tensor()));
    refused(ErrorKind::kInvalid, "has 9 elements", worker.remote("worker1", kAdd, a, a));
    refused(ErrorKind::kInvalid, "does not require grad", worker.remote("worker1", kWithoutGraph, a));
    refused(ErrorKind::kRemoteFailure, "no loss today", worker.remote("worker1", kRefuse, a));
    const TimePoint begin = now(worker);
    refused(ErrorKind::kTimedOut, "", worker.remote("worker1", kLate, a));
    EXPECT_LT(now(worker) - begin, seconds(2));
    EXPECT_THAT(context.gradients(), IsEmpty());
  });
}

// peer: dist_autograd_test.py (LibTorch's engine) roots of any shape, with their gradients: more (D, S): the
//   peer's roots are scalars
TEST_P(AutogradRoots, RootsOfAnyShapeTakeTheirGradients) {
  for (const PassMode mode : {PassMode::kSmart, PassMode::kFast}) {
    on_first(world(), [&](Worker& worker) {
      const at::Tensor a = kind_.make(1), b = kind_.make(2), given = kind_.make(3, false);
      const at::Tensor x = a.detach().clone().set_requires_grad(true),
                       y = b.detach().clone().set_requires_grad(true);
      torch::autograd::backward({at::add(x, y, 2), kind_.sum(y)}, {given, at::Tensor()});
      Context context(worker);
      const at::Tensor sum = worker.rpc_sync("worker1", kAdd, a, at::mul(b, 2));
      const Tensors roots{sum, kind_.sum(b)}, gradients{given, at::Tensor()};
      for (const bool retain : {true, false}) {
        context.backward(roots, gradients, {.retain_graph = retain, .mode = mode});
      }
      expect_equal(context.gradient(a), at::mul(x.grad(), 2));
      expect_equal(context.gradient(b), at::mul(y.grad(), 2));
      EXPECT_THAT(context.gradients(), SizeIs(2));
      EXPECT_FALSE(given.requires_grad());
    });
  }
}

// peer: dist_autograd_test.py (LibTorch's engine) roots of any shape
TEST(AutogradRoots, GradientsThatDoNotFitTheirRootsAreRefused) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), none;
    const at::Tensor root = a * 2, ones = at::ones({3, 3}, at::kDouble);
    Context context(worker);
    const auto refused = [&](const std::string& text, const Tensors& roots, const Tensors& gradients) {
      expect_error(ErrorKind::kInvalid, text, [&] { context.backward(roots, gradients); });
    };
    refused("no root", {}, {});
    refused("1 gradients for 2 roots", {root, root}, {ones});
    refused("root 1 has the shape [3, 3], but its gradient [3]", {root, root}, {ones, ones[0]});
    refused("root 0 has 9 elements", {root}, {none});
    refused("root 0 is undefined", {none}, {ones});
    refused("root 0 does not require grad", {a.detach()}, {ones});
    refused("root 0 is of type Double, but its gradient of type ComplexDouble", {root},
            {ones.to(at::kComplexDouble)});
    EXPECT_THAT(context.gradients(), IsEmpty());
  });
}

/// As in LibTorch: alone, in a list, twice, and if the loss also depends on it.
TEST(AutogradRoots, ALeafAmongTheRootsGetsItsRootsGradient) {
  on_first(world(), [](Worker& worker) {
    for (const PassMode mode : {PassMode::kSmart, PassMode::kFast}) {
      const at::Tensor a = Kind(false).make(1), x = at::full({}, 3.0, at::kDouble).set_requires_grad(true);
      const at::Tensor given = Kind(false).make(2, false);
      Context context(worker);
      const auto gradient_and_clear = [&](const at::Tensor& leaf) {
        const at::Tensor gradient = context.gradient(leaf).clone();
        context.clear_gradients();
        return gradient;
      };
      context.backward(x, {.mode = mode});
      EXPECT_EQ(gradient_and_clear(x).item<double>(), 1);
      context.backward({x, worker.rpc_sync("worker1", kAdd, a, x).sum(), x}, {.mode = mode});
      expect_equal(context.gradient(a), at::ones_like(a).detach());
      EXPECT_EQ(gradient_and_clear(x).item<double>(), 11);
      context.backward({a, x}, {given, at::Tensor()}, {.mode = mode});
      EXPECT_EQ(context.gradient(x).item<double>(), 1);
      expect_equal(gradient_and_clear(a), given);
      const at::Tensor sum = worker.rpc_sync("worker1", kAdd, a, a);
      context.backward({a, sum}, {given, given}, {.mode = mode});
      expect_equal(context.gradient(a), given * 3);
      EXPECT_FALSE(a.grad().defined());
    }
  });
}

TEST(AutogradRoots, AReferenceToALeafIsARoot) {
  on_first(world(), [](Worker& worker) {
    const auto there = worker.remote("worker1", kHeldScalar);
    const auto here = worker.remote("worker0", kHeldScalar);
    Context context(worker);
    context.backward(there);
    EXPECT_EQ(there.rpc_sync(kGradientAt).item<double>(), 1);
    context.backward(here);
    EXPECT_EQ(here.rpc_sync(kGradientAt).item<double>(), 1);
  });
}

/// The remains of the failed pass are on a worker that the caller did not call.
// peer: dist_autograd_test.py (none) running a failed pass again in its context: more:
//   `context.clear_gradients()`; the peer keeps what the failed pass had added
TEST(AutogradRoots, APassThatFailedIsRunAgainFromNothing) {
  on_first(world(3), [](Worker& worker) {
    const Kind kind(false);
    const auto kept = worker.remote("worker2", kHeld, false);
    const at::Tensor a = kind.make(1), b = kind.make(102);
    const Tensors wanted = expected(kind, {a, b}, [](const Tensors& x) { return x[1] * x[0] + x[0]; });
    Context context(worker);
    const at::Tensor through = worker.rpc_sync("worker0", kFails, a, 1);
    const at::Tensor loss = worker.rpc_sync("worker1", kAddThere, 2, kept, through).sum();
    expect_error(ErrorKind::kInvalid, "not this time",
                 [&] { context.backward(loss, {.retain_graph = true}); });
    EXPECT_TRUE(kept.rpc_sync(kGradientAt).defined()) << "a part of the failed pass";
    context.clear_gradients();
    EXPECT_THAT(all_keys(worker), Each(0));
    context.backward(loss, {.retain_graph = true});
    expect_equal(context.gradient(a), wanted[0]);
    expect_equal(kept.rpc_sync(kGradientAt), wanted[1]);
    context.clear_gradients();
    context.backward(loss);
    expect_equal(kept.rpc_sync(kGradientAt), wanted[1]);
  });
}

// peer: dist_autograd_test.py (none) running a failed pass again in its context
TEST(AutogradRoots, GradientsAreNotClearedWhileAPassRuns) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    int asked = 0;
    a.register_hook([&](const at::Tensor& gradient) {
      ++asked;
      expect_error(ErrorKind::kInvalid, "still runs on worker 'worker0'", [&] { context.clear_gradients(); });
      return gradient;
    });
    context.backward(worker.rpc_sync("worker1", kAdd, a, a).sum());
    EXPECT_EQ(asked, 1);
    expect_equal(context.gradient(a), at::full_like(a, 2).detach());
  });
}

// peer: dist_autograd_test.py (none) running a failed pass again in its context
TEST(AutogradRoots, ClearingThatIsNotAcknowledgedIsReportedAndMayBeRepeated) {
  SimCluster cluster(world(3));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const auto kept = worker.remote("worker2", kHeld, false);
    Context context(worker);
    context.backward(worker.rpc_sync("worker1", kAddThere, 2, kept, Kind(false).make(1)).sum());
    cluster.network().drop_if([](const net::SimMessage& message) {
      return wire::decode_frame(message.header).header.type == wire::MessageType{0x0109};
    });
    const Error error = error_of([&] { context.clear_gradients(seconds(1)); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(), HasSubstr("worker 'worker"));
    cluster.network().drop_if({});
    EXPECT_TRUE(kept.rpc_sync(kGradientAt).defined());
    context.clear_gradients();
    EXPECT_THAT(all_keys(worker), Each(0));
  });
}

TEST(AutogradRoots, ALossOfAnotherContextIsNamedAsThat) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    at::Tensor loss;
    {
      Context first(worker);
      loss = worker.rpc_sync("worker1", kAdd, a, a).sum();
    }
    Context second(worker);
    const at::Tensor own = worker.rpc_sync("worker1", kAdd, a, a).sum();
    for (const PassMode mode : {PassMode::kSmart, PassMode::kFast}) {
      for (const at::Tensor& root : {loss, loss + own}) {
        expect_error(ErrorKind::kInvalid, "the loss depends on the result of 'add'",
                     [&] { second.backward(root, {.retain_graph = true, .mode = mode}); });
      }
    }
    second.clear_gradients();
    second.backward(own);
    expect_equal(second.gradient(a), at::full_like(a, 2).detach());
  });
}

TEST(AutogradRoots, AStopIsHeededBeforeThePassAndWhileItsRootIsMade) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    std::stop_source source;
    const auto made = worker.remote(0, kLate, a);
    Thread stopper = worker.runtime().executor.spawn("stopper", [&] {
      nap(worker, milliseconds(100));
      source.request_stop();
    });
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kCancelled, "stopped while its root was being created",
                 [&] { context.backward(made, {.stop = source.get_token()}); });
    EXPECT_LT(now(worker) - begin, seconds(1));
    expect_error(ErrorKind::kCancelled, "cancelled this backward pass before it began",
                 [&] { context.backward((a * 2).sum(), {.stop = source.get_token()}); });
    EXPECT_FALSE(context.gradient(a).defined());
    EXPECT_EQ(counts_of(worker).passes, 0U);
  });
}

TEST(AutogradRoots, ALatePassNamesTheBusyWorker) {
  on_first(world(2), [](Worker& worker) {
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kOwnSlow).sum();
    const Error error = error_of([&] { context.backward(loss, {.timeout = seconds(1)}); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(), HasSubstr("BackwardOptions::timeout"));
    EXPECT_THAT(error.what(), HasSubstr("worker 'worker1' is still running nodes"));
    EXPECT_THAT(error.what(), Not(HasSubstr("[on worker")));
    EXPECT_EQ(error.worker(), "");
    nap(worker, seconds(10));
  });
}

TEST(AutogradRoots, GivenGradientsOfOtherDevicesAreRefusedByTheRootsNumber) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor root = worker.rpc_sync("worker1", kAdd, a, a);
    const at::Tensor elsewhere =
        at::empty(root.sizes(), at::TensorOptions().dtype(at::kDouble).device(at::kMeta));
    expect_error(ErrorKind::kInvalid, "root 0 is on device cpu, but its gradient on meta",
                 [&] { context.backward({root}, {elsewhere}); });
  });
}

TEST(AutogradRoots, ASparseRootOfOneElementNeedsNoGradient) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor indices = at::zeros({1, 1}, at::kLong);
    const at::Tensor a = at::sparse_coo_tensor(indices, at::ones({1}, at::kDouble), {1}).coalesce();
    a.set_requires_grad(true);
    Context context(worker);
    context.backward({at::add(a, a)}, {at::Tensor()});
    EXPECT_EQ(context.gradient(a).to_dense().item<double>(), 2);
  });
}

}  // namespace
}  // namespace torchspan::autograd_roots
