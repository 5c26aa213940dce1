// LibTorch's engine inside a distributed pass: backward functions and hooks run it, as checkpoints do.
#include "engine/test_nodes.h"
#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_nested_engines {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using ::testing::SizeIs;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor twice(const at::Tensor& x) { return x * 2; }
at::Tensor checkpointed(Worker& worker, std::int64_t to, const at::Tensor& x);
struct Layer {
  explicit Layer(std::int64_t seed) : weight(Kind(false).make(static_cast<std::uint64_t>(seed))) {}
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor weight;
};
at::Tensor weight_grad(const RRef<Layer>& layer) { return layer.local_value().weight.grad(); }
std::int64_t strays(Worker& worker) {
  return static_cast<std::int64_t>(worker.runtime().metrics.counter("autograd.stray_gradients").value());
}

constexpr Function<twice> kTwice{"twice"};
constexpr Function<checkpointed> kCheckpointed{"checkpointed"};
constexpr Class<Layer, std::int64_t> kLayer{"Layer"};
constexpr Function<&Layer::forward> kForward{"Layer.forward"};
constexpr Function<weight_grad> kWeightGrad{"weight_grad"};
constexpr Function<strays> kStrays{"strays"};

/// Twice x, on another worker; its backward calls that worker again and runs LibTorch's engine.
struct CallsAgain : torch::autograd::Function<CallsAgain> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Worker* worker, std::int64_t to) {
    context->save_for_backward({x});
    context->saved_data["worker"] = reinterpret_cast<std::int64_t>(worker);
    context->saved_data["to"] = to;
    return worker->rpc_sync(to, kTwice, x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto& worker = *reinterpret_cast<Worker*>(context->saved_data.at("worker").toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad_mode(true);
    worker.rpc_sync(context->saved_data.at("to").toInt(), kTwice, x).backward(gradients[0]);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};
at::Tensor checkpointed(Worker& worker, std::int64_t to, const at::Tensor& x) {
  return CallsAgain::apply(x, &worker, to);
}

/// x * weight; its backward recomputes that with the same weight, and runs LibTorch's engine.
struct MultipliesAgain : torch::autograd::Function<MultipliesAgain> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Layer* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return x * layer->weight;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto& layer = *reinterpret_cast<const Layer*>(context->saved_data.at("layer").toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad_mode(true);
    (x * layer.weight).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};
at::Tensor Layer::forward(const at::Tensor& x) const { return MultipliesAgain::apply(x, this); }

ClusterOptions world() {
  return autograd_world(3,
                        FunctionTable().add(kTwice, kCheckpointed, kLayer, kForward, kWeightGrad, kStrays));
}

/// Fails soon with that name, and leaves the context usable.
void expect_refused(Worker& worker, const Context& context, const at::Tensor& loss, PassMode mode) {
  const TimePoint begin = now(worker);
  const Error error = error_of([&] { context.backward(loss, {.mode = mode}); });
  EXPECT_THAT(error.what(), AllOf(HasSubstr("ran LibTorch's engine"), HasSubstr("result of 'twice'")));
  EXPECT_LT(now(worker) - begin, milliseconds(500)) << error.what();
}

class AutogradNestedEngines : public ::testing::TestWithParam<PassMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, AutogradNestedEngines, ::testing::Values(PassMode::kSmart, PassMode::kFast),
                         [](const auto& run) { return run.param == PassMode::kSmart ? "Smart" : "Fast"; });

TEST_P(AutogradNestedEngines, ACheckpointThatCallsAgainIsRefusedByName) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    for (const std::int64_t to : {0, 1}) {
      for (const bool known : {false, true}) {  // whether the callee takes part in the pass in any case
        Context context(worker);
        at::Tensor loss = CallsAgain::apply(a, &worker, to).sum();
        if (known) loss = loss + worker.rpc_sync(to, kTwice, a).sum();
        expect_refused(worker, context, loss, GetParam());
        context.clear_gradients();
        context.backward((a * 3).sum());
        expect_equal(context.gradient(a), at::full_like(a, 3).detach());
      }
    }
  });
}

TEST_P(AutogradNestedEngines, ARemoteCheckpointThatCallsAgainIsRefusedByName) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    for (const std::int64_t to : {0, 2}) {
      Context context(worker);
      const at::Tensor loss = worker.rpc_sync("worker1", kCheckpointed, to, a).sum();
      expect_refused(worker, context, loss, GetParam());
      const Error error = error_of([&] { context.backward(loss, {.mode = GetParam()}); });
      EXPECT_EQ(error.worker(), "worker1");
    }
  });
}

TEST_P(AutogradNestedEngines, AHookThatGoesBackThroughAMessageIsRefusedByName) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    Context context(worker);
    const at::Tensor y = worker.rpc_sync("worker1", kTwice, a), z = y * 3;
    z.register_hook([&](const at::Tensor&) {
      const at::AutoGradMode grad_mode(true);
      (y * 2).sum().backward();
    });
    expect_refused(worker, context, z.sum(), GetParam());
  });
}

TEST(AutogradNestedEngines, GradientsThatGoToTheGradFieldAreReported) {
  ::testing::internal::CaptureStderr();
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1);
    const auto layer = worker.remote("worker1", kLayer, 5);
    Context context(worker);
    context.backward(layer.rpc_sync(kForward, a).sum());
    expect_equal(context.gradient(a), Layer(5).weight.detach());
    EXPECT_TRUE(layer.rpc_sync(kWeightGrad).defined());
    EXPECT_EQ(worker.rpc_sync("worker1", kStrays), 1);
    EXPECT_EQ(strays(worker), 0);
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("put the gradients of 1 parameters into .grad; the context does not have them"));
}

TEST(AutogradNestedEngines, CheckpointsThatGiveTheirGradientsBackWorkAndAreNotReported) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    const Tensors wanted = expected(Kind(false), {a, b}, [](const Tensors& x) {
      return engine::testing::Recomputed::apply(x[0] * 2, x[1]);
    });
    Context context(worker);
    const at::Tensor there = worker.rpc_sync("worker1", kTwice, a);
    context.backward(engine::testing::Recomputed::apply(there, b).sum());
    expect_equal(context.gradient(a), wanted[0]);
    expect_equal(context.gradient(b), wanted[1]);
    EXPECT_THAT(context.gradients(), SizeIs(2));
    EXPECT_EQ(strays(worker), 0);
  });
}

/// A pass of LibTorch's engine that contains the distributed one does not affect it.
TEST(AutogradNestedEngines, AnEngineThatIsOutsideIsNotReported) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kTwice, a).sum(), c = b * 2;
    c.register_hook([&](const at::Tensor&) { context.backward(loss); });
    (c * b).sum().backward();
    expect_equal(context.gradient(a), at::full_like(a, 2).detach());
    EXPECT_TRUE(b.grad().defined());
    EXPECT_EQ(strays(worker), 0);
  });
}

}  // namespace
}  // namespace torchspan::autograd_nested_engines
