// Modules on another worker that are used like local ones: forward, training and state, with the same numbers
// as in one process.
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/rpc/remote_module.h>

#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_remote_modules {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

/// Behaves differently with and without training, and rejects wrong inputs.
struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t seed, std::int64_t width) {
    if (width < 1) throw std::invalid_argument("a layer of width " + std::to_string(width));
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    linear = register_module("linear", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, double scale) { return torch::tanh(norm(linear(x))) * scale; }
  bool trains() const { return is_training(); }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> list;
    for (const auto& parameter : parameters()) list.push_back(parameter.detach().clone());
    return list;
  }
  std::int64_t leave_gradients() {
    forward(at::rand({4, 3}, at::kDouble), 1).square().sum().backward();
    return gradients();
  }
  std::int64_t gradients() const {
    std::int64_t count = 0;
    for (const auto& parameter : parameters()) {
      if (parameter.grad().defined() && parameter.grad().abs().sum().item<double>() != 0) ++count;
    }
    return count;
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Layer);

constexpr ModuleClass<Layer, std::int64_t, std::int64_t> kLayer{"Layer"};
constexpr Function<&LayerImpl::trains> kTrains{"Layer.trains"};
constexpr Function<&LayerImpl::values> kValues{"Layer.values"};
constexpr Function<&LayerImpl::leave_gradients> kLeaveGradients{"Layer.leave_gradients"};
constexpr Function<&LayerImpl::gradients> kGradients{"Layer.gradients"};

/// A remote module arrives as a reference and becomes a module again.
at::Tensor forward_elsewhere(Worker& worker, const RRef<Layer>& layer, const at::Tensor& x) {
  return RemoteModule(worker, kLayer, layer).forward(x, 1.0);
}
double norm_of(const RRef<at::Tensor>& parameter) { return parameter.local_value().norm().item<double>(); }
constexpr Function<forward_elsewhere> kForwardElsewhere{"forward_elsewhere"};
constexpr Function<norm_of> kNormOf{"norm_of"};

ClusterOptions world(int workers = 3) {
  ClusterOptions options = world_of(workers, FunctionTable().add(kLayer, kTrains, kValues, kLeaveGradients,
                                                                 kGradients, kForwardElsewhere, kNormOf));
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<AutogradExtension>());
    extensions.push_back(std::make_unique<optim::OptimExtension>());
    return extensions;
  };
  return options;
}

at::Tensor input() { return at::linspace(-1, 2, 12, at::kDouble).view({4, 3}); }

void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-12, 1e-12)) << "parameter " << i;
}

// peer: remote_module_test.py forward_sync: same
TEST(RemoteModuleConformance, ForwardSync) {
  on_first(world(), [](Worker& worker) {
    Layer local(7, 3);
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    EXPECT_TRUE(at::allclose(layer.forward(input(), 2.0), local->forward(input(), 2.0)));
  });
}

// peer: remote_module_test.py forward_async: same
TEST(RemoteModuleConformance, ForwardAsync) {
  on_first(world(), [](Worker& worker) {
    Layer local(7, 3);
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    Future<at::Tensor> output = layer.forward_async(input(), 2.0);
    EXPECT_TRUE(at::allclose(output.wait(), local->forward(input(), 2.0)));
  });
}

// peer: remote_module_test.py bad_module: differs: a class that is not a module does not compile; a
//   constructor that throws is reported at the first use
TEST(RemoteModuleConformance, BadModule) {
  on_first(world(), [](Worker& worker) {
    const RemoteModule layer(worker, "worker1", kLayer, 7, -1);
    const Error failure = error_of([&] { layer.forward(input(), 1.0); });
    EXPECT_EQ(failure.worker(), "worker1");
    EXPECT_THAT(failure.what(), AllOf(HasSubstr("'Layer'"), HasSubstr("a layer of width -1")));
    expect_error(ErrorKind::kInvalid, "worker9", [&] { RemoteModule(worker, "worker9", kLayer, 7, 3); });
  });
}

// peer: remote_module_test.py (documented) errors of a forward: better: they name worker and module
TEST(RemoteModuleConformance, AForwardThatThrowsNamesWorkerAndModule) {
  on_first(world(), [](Worker& worker) {
    const RemoteModule layer(worker, "worker2", kLayer, 7, 3);
    const int line = __LINE__ + 1;
    const Error failure = error_of([&] { layer.forward(at::ones({2, 5}, at::kDouble), 1.0); });
    EXPECT_THAT(failure.what(), HasSubstr("autograd_remote_modules.cpp:" + std::to_string(line)));
    EXPECT_EQ(failure.kind(), ErrorKind::kRemoteFailure);
    EXPECT_EQ(failure.worker(), "worker2");
    EXPECT_EQ(failure.call(), "Layer.forward");
  });
}

TEST(RemoteModuleConformance, AnExpiredOptionEndsAForward) {
  SimCluster cluster(world());
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    layer.creation().wait();
    cluster.network().cut("worker0", "worker1");
    expect_error(ErrorKind::kTimedOut, "Layer.forward",
                 [&] { layer.with({.timeout = milliseconds(100)}).forward(input(), 1.0); });
    cluster.network().heal("worker0", "worker1");
  });
}

// peer: remote_module_test.py get_module_rref: same: a `RemoteModule` is an `RRef`
TEST(RemoteModuleConformance, GetModuleRref) {
  on_first(world(), [](Worker& worker) {
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    const RRef<Layer>& rref = layer;
    EXPECT_EQ(rref.owner_name(), "worker1");
    EXPECT_TRUE(rref.rpc_sync(kTrains));
  });
}

TEST(RemoteModuleConformance, RemoteTakesAModuleClass) {
  on_first(world(), [](Worker& worker) {
    const RRef<Layer> module = worker.remote("worker2", kLayer, 7, 3);
    EXPECT_EQ(module.owner().name, "worker2");
    const RemoteModule layer(worker, kLayer, module);
    const RemoteModule twin(worker, "worker1", kLayer, 7, 3);
    const at::Tensor x = at::arange(12, at::kDouble).view({4, 3});
    EXPECT_TRUE(layer.forward(x, 1.0).equal(twin.forward(x, 1.0)));
  });
}

// peer: remote_module_test.py create_remote_module_from_module_rref: same
TEST(RemoteModuleConformance, CreateRemoteModuleFromModuleRref) {
  on_first(world(), [](Worker& worker) {
    Layer local(7, 3);
    const RRef<Layer> rref = worker.remote("worker1", kLayer.constructor(), 7, 3);
    EXPECT_TRUE(
        at::allclose(RemoteModule(worker, kLayer, rref).forward(input(), 1.0), local->forward(input(), 1.0)));
  });
}

// peer: remote_module_test.py send_remote_module_over_the_wire: same: it is sent as its `RRef`
TEST(RemoteModuleConformance, SendRemoteModuleOverTheWire) {
  on_first(world(), [](Worker& worker) {
    Layer local(7, 3);
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    const at::Tensor output = worker.rpc_sync("worker2", kForwardElsewhere, layer, input());
    EXPECT_TRUE(at::allclose(output, local->forward(input(), 1.0)));
  });
}

// peer: remote_module_test.py remote_parameters: same
TEST(RemoteModuleConformance, RemoteParameters) {
  on_first(world(), [](Worker& worker) {
    Layer local(7, 3);
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    const std::vector<RRef<at::Tensor>> remote = layer.parameter_rrefs();
    const auto expected = local->parameters();
    ASSERT_EQ(remote.size(), expected.size());
    for (std::size_t i = 0; i < remote.size(); ++i) {
      EXPECT_EQ(remote[i].owner_name(), "worker1");
      EXPECT_TRUE(at::equal(remote[i].to_here(), expected[i]));
    }
    // They are the parameters themselves, and may be sent on.
    const std::vector<RRef<at::Tensor>> here = parameter_rrefs(worker, local);
    ASSERT_EQ(here.size(), expected.size());
    EXPECT_TRUE(here[0].local_value().is_same(expected[0]));
    EXPECT_DOUBLE_EQ(worker.rpc_sync("worker1", kNormOf, remote[0]), expected[0].norm().item<double>());
  });
}

// peer: remote_module_test.py train_eval: same
TEST(RemoteModuleConformance, TrainEval) {
  on_first(world(), [](Worker& worker) {
    Layer local(7, 3);
    local->eval();
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    layer.eval();
    EXPECT_FALSE(layer.rpc_sync(kTrains));
    EXPECT_TRUE(at::allclose(layer.forward(input(), 1.0), local->forward(input(), 1.0)));
    layer.train();
    EXPECT_TRUE(layer.rpc_sync(kTrains));
  });
}

TEST(RemoteModuleConformance, ZeroGradClearsTheGradientsThere) {
  on_first(world(), [](Worker& worker) {
    const RemoteModule layer(worker, "worker1", kLayer, 7, 3);
    EXPECT_GT(layer.rpc_sync(kLeaveGradients), 0);
    layer.zero_grad();
    EXPECT_EQ(layer.rpc_sync(kGradients), 0);
  });
}

/// Two layers on two workers, trained through references to modules or to parameters, end with the values of
/// one process.
void expect_training_as_in_one_process(Worker& worker, bool by_parameters) {
  Layer first(1, 3), second(2, 3);
  std::vector<at::Tensor> parameters = first->parameters();
  for (const auto& parameter : second->parameters()) parameters.push_back(parameter);
  torch::optim::SGD oracle(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  const RemoteModule near(worker, "worker1", kLayer, 1, 3), far(worker, "worker2", kLayer, 2, 3);
  std::vector<optim::Target> targets;
  if (by_parameters) {
    for (const auto* layer : {&near, &far}) {
      for (const auto& parameter : layer->parameter_rrefs()) targets.emplace_back(parameter);
    }
  } else {
    targets = {near, far};
  }
  optim::DistributedOptimizer optimizer(worker, optim::SGD{.lr = 0.1, .momentum = 0.9}, targets);
  for (int step = 0; step < 4; ++step) {
    const at::Tensor x = input() * (step + 1);
    oracle.zero_grad();
    const at::Tensor expected = second->forward(first->forward(x, 1.0), 2.0).square().mean();
    expected.backward();
    oracle.step();
    Context context(worker);
    const at::Tensor loss = far.forward(near.forward(x, 1.0), 2.0).square().mean();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
    context.backward(loss);
    optimizer.step(context);
  }
  expect_close(near.rpc_sync(kValues), first->values());
  expect_close(far.rpc_sync(kValues), second->values());
}

// peer: remote_module_test.py (documented) trained by a distributed optimizer: same: the results of one
//   process
TEST(RemoteModuleConformance, TrainsLikeTheSameModulesInOneProcess) {
  for (const bool by_parameters : {false, true}) {
    SCOPED_TRACE(by_parameters ? "references to parameters" : "references to modules");
    on_first(world(), [&](Worker& worker) { expect_training_as_in_one_process(worker, by_parameters); });
  }
}

}  // namespace
}  // namespace torchspan::autograd_remote_modules
