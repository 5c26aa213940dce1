// Trainers that share the tensors of parameter servers, each in a separate context.
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/resolver.h>

#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_servers {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::SizeIs;

constexpr int kTrainers = 3, kServers = 4;

/// Adds a server's tensor, times its rank, to a trainer's value.
at::Tensor held(Worker& worker, bool sparse) { return Kind(sparse).make(100 + worker.rank()); }
at::Tensor add_on(Worker& worker, const RRef<at::Tensor>& kept, const at::Tensor& other) {
  return at::add(other, kept.local_value(), static_cast<std::int64_t>(worker.rank()));
}
Tensors gradients_here(Worker& worker) {
  Tensors gradients;
  for (const auto& [parameter, gradient] : autograd::current(worker).gradients())
    gradients.push_back(gradient);
  return gradients;
}
std::int64_t contexts_here(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).contexts); }
std::uint64_t train(Worker& worker, const std::vector<RRef<at::Tensor>>& kept, bool sparse);
std::uint64_t train_by_script(Worker& worker, const std::vector<RRef<c10::IValue>>& kept);

constexpr Function<held> kHeld{"held"};
constexpr Function<add_on> kAddOn{"add_on"};
constexpr Function<gradients_here> kGradientsHere{"gradients_here"};
constexpr Function<contexts_here> kContextsHere{"contexts_here"};
constexpr Function<train> kTrain{"train"};
constexpr Function<train_by_script> kTrainByScript{"train_by_script"};

ClusterOptions world() {
  FunctionTable functions;
  functions.add(kHeld, kAddOn, kGradientsHere, kContextsHere, kTrain, kTrainByScript);
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  unit->define(c10::QualifiedName("script"), R"(
def make(seed: int) -> Tensor:
    return torch.full([3, 3], seed, dtype=7).requires_grad_()
def add(x: Tensor, y: Tensor, alpha: int) -> Tensor:
    return torch.add(x, y, alpha=alpha)
)",
               torch::jit::nativeResolver(), nullptr);
  functions.add_script(unit);
  return autograd_world(kTrainers + kServers, std::move(functions));
}

/// Differentiates `factor` times the trainer's value; all trainers have their gradients at the same time, and
/// each sees only its own.
std::uint64_t finish(Worker& worker, const Kind& kind, const Context& context, const at::Tensor& own,
                     const at::Tensor& made) {
  const double factor = worker.rank() + 1;
  const std::vector<std::string> trainers{"worker0", "worker1", "worker2"};
  context.backward(kind.sum(at::mul(made, factor)));
  worker.barrier(trainers);
  const at::Tensor one = expected(kind, {own}, [](const Tensors& x) { return x[0]; })[0];
  expect_equal(context.gradient(own), at::mul(one, factor));
  for (int server = kTrainers; server < kTrainers + kServers; ++server) {
    EXPECT_EQ(worker.rpc_sync(server, kContextsHere), kTrainers);
    const Tensors gradients = worker.rpc_sync(server, kGradientsHere);
    EXPECT_THAT(gradients, SizeIs(1));
    if (gradients.size() == 1) expect_equal(gradients[0], at::mul(one, factor * server));
  }
  worker.barrier(trainers);
  return context.id();
}

std::uint64_t train(Worker& worker, const std::vector<RRef<at::Tensor>>& kept, bool sparse) {
  const Kind kind(sparse);
  const at::Tensor own = kind.make(worker.rank());
  Context context(worker);
  at::Tensor made = own;
  for (const RRef<at::Tensor>& tensor : kept) made = tensor.rpc_sync(kAddOn, made);
  return finish(worker, kind, context, own, made);
}

/// A script takes no RRef: the trainer fetches the value.
std::uint64_t train_by_script(Worker& worker, const std::vector<RRef<c10::IValue>>& kept) {
  const Kind kind(false);
  const at::Tensor own = kind.make(worker.rank());
  Context context(worker);
  at::Tensor made = own;
  for (const RRef<c10::IValue>& tensor : kept) {
    const auto server = static_cast<std::int64_t>(tensor.owner().rank);
    made = worker.rpc_sync(server, "script.add", {made, tensor.to_here(), server}).toTensor();
  }
  return finish(worker, kind, context, own, made);
}

/// Worker 0 creates the servers' tensors, and starts all trainers, including itself, at the same time.
template <class T, auto kFunction, class... More>
void have_all_train(Worker& worker, const std::vector<RRef<T>>& kept, Function<kFunction> train_token,
                    More... more) {
  std::vector<Future<std::uint64_t>> training;
  for (int trainer = 0; trainer < kTrainers; ++trainer) {
    training.push_back(worker.rpc_async(trainer, train_token, kept, more...));
  }
  std::set<std::uint64_t> contexts;
  for (const auto& trained : training) contexts.insert(trained.wait());
  EXPECT_THAT(contexts, SizeIs(kTrainers)) << "one context each";
}

class AutogradServers : public DenseAndSparse {};
INSTANTIATE_TEST_SUITE_P(Kinds, AutogradServers, ::testing::Bool(),
                         [](const auto& run) { return run.param ? "Sparse" : "Dense"; });

// peer: dist_autograd_test.py trainer_ps: same (D, S): three trainers at once, each in its context, on one
//   tensor of each of four servers
TEST_P(AutogradServers, TrainerPs) {
  on_first(world(), [&](Worker& worker) {
    std::vector<RRef<at::Tensor>> kept;
    for (int server = 0; server < kServers; ++server) {
      kept.push_back(worker.remote(kTrainers + server, kHeld, kind_.sparse()));
    }
    have_all_train(worker, kept, kTrain, kind_.sparse());
  });
}

// peer: dist_autograd_test.py trainer_ps_torchscript_functions: differs: a script takes no reference, so
//   the trainer fetches the tensor in its context and the script adds to it
TEST(AutogradServers, TrainerPsTorchscriptFunctions) {
  on_first(world(), [](Worker& worker) {
    std::vector<RRef<c10::IValue>> kept;
    for (std::int64_t server = 0; server < kServers; ++server) {
      kept.push_back(worker.remote(kTrainers + server, "script.make", {server}));
    }
    have_all_train(worker, kept, kTrainByScript);
  });
}

}  // namespace
}  // namespace torchspan::autograd_servers
