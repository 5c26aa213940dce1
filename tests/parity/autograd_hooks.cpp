// Hooks, and which tensors share the memory of a gradient.
#include <ATen/record_function.h>

#include "engine/test_nodes.h"
#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_hooks {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using engine::testing::CountingPostHook;
using ::testing::ElementsAre;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
Tensors both(const at::Tensor& a, const at::Tensor& b) { return {a * 2, b * 3}; }
/// a + b; its backward returns no gradient for b.
struct Forgets : torch::autograd::Function<Forgets> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& a, const at::Tensor& b) { return a + b; }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};
at::Tensor embed(const at::Tensor& table, const at::Tensor& indices, const at::Tensor& offsets) {
  return std::get<0>(at::embedding_bag(table, indices, offsets, false, 0, true));
}

/// An EmbeddingBag with sparse gradients.
struct Bag {
  explicit Bag(std::int64_t seed) {
    table = at::randn({6, 4}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)), at::kDouble)
                .set_requires_grad(true);
  }
  at::Tensor forward(const at::Tensor& indices, const at::Tensor& offsets) const {
    return embed(table, indices, offsets);
  }
  at::Tensor table;
};
at::Tensor table_gradient(Worker& worker, const RRef<Bag>& bag) {
  return autograd::current(worker).gradient(bag.local_value().table);
}

/// The names of the spans of a pass here, in the order in which they ended.
std::vector<std::string> spans_of(Worker& worker, std::uint64_t pass) {
  std::vector<std::string> names;
  for (const SpanRecord& span : worker.runtime().spans.snapshot()) {
    if (span.kind == SpanKind::kAutograd && span.id == pass) names.emplace_back(span.name.data());
  }
  return names;
}

constexpr Function<add> kAdd{"add"};
constexpr Function<both> kBoth{"both"};
constexpr Function<spans_of> kSpansOf{"spans_of"};
constexpr Class<Bag, std::int64_t> kBag{"Bag"};
constexpr Function<&Bag::forward> kForward{"Bag.forward"};
constexpr Function<table_gradient> kTableGradient{"table_gradient"};

ClusterOptions world(int workers = 2) {
  return autograd_world(workers, FunctionTable().add(kAdd, kBoth, kBag, kForward, kTableGradient, kSpansOf));
}

// peer: dist_autograd_test.py backward_verify_hooks: same
TEST(AutogradHooks, BackwardVerifyHooks) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    int calls = 0;
    a.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
    Context context(worker);
    context.backward(worker.rpc_sync("worker1", kAdd, a, b).sum());
    EXPECT_EQ(calls, 1);
    expect_equal(context.gradient(a), at::full_like(a, 2).detach());
    expect_equal(context.gradient(b), at::ones_like(b).detach());
  });
}

// peer: dist_autograd_test.py post_hooks: same
TEST(AutogradHooks, PostHooks) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    int first = 0, second = 0;
    const auto node = torch::autograd::impl::grad_accumulator(a);
    node->add_post_hook(std::make_unique<CountingPostHook>(first));
    node->add_post_hook(std::make_unique<CountingPostHook>(second));
    Context context(worker);
    const at::Tensor there = worker.rpc_sync("worker1", kAdd, a, a);
    context.backward((there + a).sum());
    EXPECT_EQ(first, 1);
    EXPECT_EQ(second, 1);
    expect_equal(context.gradient(a), at::full_like(a, 3).detach());
    EXPECT_FALSE(a.grad().defined());
    EXPECT_FALSE(at::hasThreadLocalCallbacks()) << "later operators of this thread would be observed";
    context.backward(worker.rpc_sync("worker1", kAdd, a, a).sum(), {.run_leaf_hooks = false});
    EXPECT_EQ(first, 1) << "the caller runs them";
    expect_equal(context.gradient(a), at::full_like(a, 5).detach());
  });
}

/// In one process each of the tensors has a separate node, which then does not run.
TEST(AutogradHooks, OfATensorThatGetsNoGradientBesideOneThatDoesAreNotCalled) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    for (const PassMode mode : {PassMode::kSmart, PassMode::kFast}) {
      for (const std::size_t used : {0, 1}) {
        Context context(worker);
        const Tensors parts = worker.rpc_sync("worker1", kBoth, a, b);
        std::vector<int> calls(2);
        for (std::size_t i = 0; i < 2; ++i) {
          parts[i].retain_grad();
          parts[i].register_hook([&calls, i](const at::Tensor& gradient) {
            ++calls[i];
            return gradient * 10;
          });
          parts[i].register_hook([&calls, i](const at::Tensor&) { ++calls[i]; });
        }
        // FAST: everything that was sent contributes.
        const at::Tensor rest = worker.rpc_sync("worker1", kAdd, a, b).sum();
        context.backward(parts[used].sum() + rest, {.mode = mode});
        EXPECT_EQ(calls[used], 2);
        EXPECT_EQ(calls[1 - used], 0);
        EXPECT_TRUE(parts[used].grad().defined());
        EXPECT_FALSE(parts[1 - used].grad().defined());
        expect_equal(context.gradient(used == 0 ? a : b), at::full_like(a, used == 0 ? 21 : 31).detach());
        expect_equal(context.gradient(used == 0 ? b : a), at::ones_like(a).detach());
      }
    }
  });
}

/// The loss reaches it: as in one process, the hook sees an undefined gradient.
TEST(AutogradHooks, OfATensorWhoseGradientIsForgottenSeeAnUndefinedOne) {
  const auto see = [](const Tensors& parts, std::vector<int>& seen) {
    for (const at::Tensor& part : parts) {
      // Without NDEBUG, the headers of LibTorch refuse undefined gradients for hooks that take an at::Tensor.
      static_cast<const at::TensorBase&>(part).register_hook(
          [&seen](const at::TensorBase& gradient) { seen.push_back(gradient.defined() ? 1 : 0); });
    }
    return Forgets::apply(parts[0], parts[1]).sum();
  };
  on_first(world(), [&](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    std::vector<int> here, there;
    see(both(a, b), here).backward();
    Context context(worker);
    context.backward(see(worker.rpc_sync("worker1", kBoth, a, b), there));
    std::sort(here.begin(), here.end());
    std::sort(there.begin(), there.end());
    EXPECT_THAT(there, ElementsAre(0, 1));
    EXPECT_EQ(there, here);
  });
}

/// The message arrived first, so its node would run last.
TEST(AutogradHooks, OfATensorThatCameInRunAsEarlyAsTheGraphAllows) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    std::vector<std::string> order;
    const auto note = [&order](const at::Tensor& x, const char* name) {
      x.register_hook([&order, name](const at::Tensor&) { order.emplace_back(name); });
    };
    Context context(worker);
    const at::Tensor first = worker.rpc_sync("worker1", kAdd, a, a);
    const at::Tensor second = worker.rpc_sync("worker1", kAdd, a, a);
    at::Tensor local = b;
    for (int i = 0; i < 3; ++i) {
      local = local * 2;
      note(local, "local");
    }
    note(first, "first");
    note(second, "second");
    note(b, "leaf");
    context.backward(at::stack({first, second, local, b}).sum());
    EXPECT_THAT(order, ElementsAre("second", "first", "local", "local", "local", "leaf"));
  });
}

/// The error says that the gradient cannot be sent, and does not report a lost worker.
TEST(AutogradHooks, AGradientThatCannotBeSentIsNamed) {
  struct ToCsr : torch::autograd::FunctionPreHook {
    variable_list operator()(const variable_list& gradients) override {
      return {gradients.at(0).to_sparse_csr()};
    }
  };
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor y = worker.rpc_sync("worker1", kAdd, a, a);
    y.grad_fn()->add_pre_hook(std::make_unique<ToCsr>());
    const Error error = error_of([&] { context.backward(y.sum()); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("layout SparseCsr is not supported"),
                                    HasSubstr("result of 'add'"), Not(HasSubstr("lost worker"))));
  });
}

/// The memory of the gradients that a function's backward got and returned.
struct Seen {
  const void* memory = nullptr;
};
const void* memory_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values().data_ptr() : gradient.data_ptr();
}
Seen& seen_by(AutogradContext* context) {
  return *reinterpret_cast<Seen*>(context->saved_data.at("seen").toInt());
}
void watch(AutogradContext* context, Seen& seen) {
  context->saved_data["seen"] = reinterpret_cast<std::int64_t>(&seen);
}

/// Both inputs get the same gradient tensor.
struct TwoOfOne : torch::autograd::Function<TwoOfOne> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b, Seen& seen) {
    watch(context, seen);
    return a + b;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    seen_by(context).memory = memory_of(gradients[0]);
    return {gradients[0], gradients[0], at::Tensor()};
  }
};
struct OneOfOne : torch::autograd::Function<OneOfOne> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, Seen& seen) {
    watch(context, seen);
    return a.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    seen_by(context).memory = memory_of(gradients[0]);
    return {gradients[0], at::Tensor()};
  }
};
/// Its gradient is one number, expanded.
struct Expanded : torch::autograd::Function<Expanded> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& a) { return a.sum(); }
  static variable_list backward(AutogradContext*, variable_list) {
    return {at::ones({1}, at::kDouble).expand({3, 3})};
  }
};

// peer: dist_autograd_test.py no_grad_copy: same
TEST(AutogradHooks, NoGradCopy) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Seen seen;
    {
      Context context(worker);  // expanded memory may be shared: copied for both
      context.backward(Expanded::apply(TwoOfOne::apply(a, b, seen)));
      EXPECT_NE(context.gradient(a).data_ptr(), seen.memory);
      EXPECT_NE(context.gradient(b).data_ptr(), seen.memory);
      EXPECT_NE(context.gradient(a).data_ptr(), context.gradient(b).data_ptr());
      EXPECT_TRUE(context.gradient(a).is_contiguous());
    }
    {
      Context context(worker);  // no other reference: taken without a copy
      context.backward(OneOfOne::apply(a, seen).select(1, 0).select(0, 1));
      EXPECT_EQ(context.gradient(a).data_ptr(), seen.memory);
    }
    {
      Context context(worker);  // two leaves, one gradient: they must not share it
      context.backward(TwoOfOne::apply(a, b, seen).select(1, 0).select(0, 1));
      EXPECT_NE(context.gradient(a).data_ptr(), context.gradient(b).data_ptr());
      EXPECT_TRUE(context.gradient(a).data_ptr() == seen.memory ||
                  context.gradient(b).data_ptr() == seen.memory);
    }
  });
}

/// Holds a reference to a gradient's indices.
struct Keeper {
  bool keeps = false;
  at::Tensor indices;
};
/// Its gradient is sparse.
struct SparseMaker : torch::autograd::Function<SparseMaker> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, Keeper& keeper, Seen& seen) {
    watch(context, seen);
    context->saved_data["keeper"] = reinterpret_cast<std::int64_t>(&keeper);
    return a.sum();
  }
  static variable_list backward(AutogradContext* context, variable_list) {
    at::Tensor gradient = at::_sparse_coo_tensor_unsafe(at::tensor({0, 2}, at::kLong).view({1, 2}).clone(),
                                                        at::ones({2, 3}, at::kDouble), {3, 3}, at::kDouble);
    seen_by(context).memory = memory_of(gradient);
    auto& keeper = *reinterpret_cast<Keeper*>(context->saved_data.at("keeper").toInt());
    if (keeper.keeps) keeper.indices = gradient._indices();
    return {std::move(gradient), at::Tensor(), at::Tensor()};
  }
};

// peer: dist_autograd_test.py no_grad_copy_sparse: better: not copied if nothing else refers to its memory;
//   indices that are an embedding's input are copied; the peer's gradient changes when the input does
TEST(AutogradHooks, NoGradCopySparse) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Seen seen, passed_on;
    Keeper unused_keeper;
    {
      Context context(worker);  // no other reference to its indices or values: taken without a copy
      const at::Tensor loss = SparseMaker::apply(a, unused_keeper, seen) * 1.0;
      context.backward(loss, {.retain_graph = true});
      const at::Tensor gradient = context.gradient(a);
      ASSERT_TRUE(gradient.is_sparse());
      EXPECT_EQ(memory_of(gradient), seen.memory);
      const at::Tensor once = gradient.to_dense();
      for (int pass = 0; pass < 10; ++pass) context.backward(loss, {.retain_graph = true});
      expect_equal(gradient, once);
      expect_equal(context.gradient(a), once * 11);
    }
    {
      Context context(worker);  // two leaves, one gradient: they must not share it
      context.backward(SparseMaker::apply(TwoOfOne::apply(a, b, passed_on), unused_keeper, seen) * 1.0);
      EXPECT_EQ(passed_on.memory, seen.memory) << "it is passed on without a copy";
      EXPECT_NE(memory_of(context.gradient(a)), memory_of(context.gradient(b)));
      expect_equal(context.gradient(a), context.gradient(b));
    }
  });
}

/// An embedding's gradient uses the memory of its input as indices: later changes of the input must not reach
/// the gradient. Its values have no other reference.
// peer: dist_autograd_test.py no_grad_copy_sparse
TEST(AutogradHooks, GradCopySparseWhoseIndicesAreAnInput) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor table = Kind(false).make(1), rows = at::tensor({0, 2}, at::kLong);
    Seen seen;
    Context context(worker);
    context.backward(at::embedding(OneOfOne::apply(table, seen), rows, -1, false, true).mul(2).sum());
    const at::Tensor gradient = context.gradient(table);
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_EQ(memory_of(gradient), seen.memory);
    const at::Tensor before = gradient.to_dense();
    EXPECT_EQ(before.sum().item<double>(), 12.0);
    rows.zero_();
    expect_equal(gradient, before);
  });
}

// peer: dist_autograd_test.py grad_copy_sparse_indices_extra_ref: better: indices with another reference are
//   copied; the peer's are shared and change with it
TEST(AutogradHooks, GradCopySparseIndicesExtraRef) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Seen seen;
    Keeper keeper{true, {}};
    Context context(worker);
    context.backward(SparseMaker::apply(a, keeper, seen) * 1.0);
    const at::Tensor gradient = context.gradient(a);
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_EQ(memory_of(gradient), seen.memory) << "its values are not shared";
    EXPECT_NE(gradient._indices().data_ptr(), keeper.indices.data_ptr());
    const at::Tensor before = gradient.to_dense();
    keeper.indices.zero_();
    expect_equal(gradient, before);
  });
}

// peer: dist_autograd_test.py embedding_bag_with_no_grad_tensors: same
TEST(AutogradHooks, EmbeddingBagWithNoGradTensors) {
  on_first(world(), [](Worker& worker) {
    const auto bag = worker.remote("worker1", kBag, 7);
    Bag local(7);
    const at::Tensor indices = at::tensor({1, 2, 4, 5, 4, 3, 2, 5}, at::kLong);
    const at::Tensor offsets = at::tensor({0, 4}, at::kLong);
    local.forward(indices, offsets).pow(2).sum().backward();
    Context context(worker);
    context.backward(bag.rpc_sync(kForward, indices, offsets).pow(2).sum());
    const at::Tensor gradient = bag.rpc_sync(kTableGradient);
    EXPECT_TRUE(gradient.is_sparse());
    expect_equal(gradient, local.table.grad());
  });
}

/// Instead of the peer's profiler: spans show what ran on which worker, and for which pass.
// peer: dist_autograd_test.py dist_autograd_profiling: differs: TorchSpan's spans instead of LibTorch's
//   profiler: the call, the pass, and, with the pass's id, the gradients sent and received for each message
//   on both workers
TEST(AutogradHooks, DistAutogradProfiling) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    context.backward(worker.rpc_sync("worker1", kAdd, a, a).sum());
    std::uint64_t pass = 0;
    bool called = false;
    for (const SpanRecord& span : worker.runtime().spans.snapshot()) {
      const std::string name(span.name.data());
      if (span.kind == SpanKind::kAutograd && name == "backward") pass = span.id;
      called = called || (span.kind == SpanKind::kCall && name == "add");
    }
    EXPECT_TRUE(called);
    EXPECT_THAT(spans_of(worker, pass), ElementsAre("send gradients: result of add",
                                                    "receive gradients: arguments of add", "backward"));
    EXPECT_THAT(worker.rpc_sync("worker1", kSpansOf, pass),
                ElementsAre("receive gradients: result of add", "send gradients: arguments of add"));
  });
}

}  // namespace
}  // namespace torchspan::autograd_hooks
