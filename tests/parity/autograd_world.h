#pragma once
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>

#include "tests/parity/rpc_world.h"

/// Distributed autograd, with the cases of PyTorch's own tests. Each test runs over dense and over sparse
/// tensors if the peer has both, and over the three ways to call.
namespace torchspan::testing {

using autograd::AutogradExtension;
using autograd::Context;
using autograd::ContextGraph;
using autograd::GraphPart;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Tensors = std::vector<at::Tensor>;

enum class Way { kSync, kAsync, kRemote };
constexpr Way kWays[] = {Way::kSync, Way::kAsync, Way::kRemote};

/// Calls a function in one of the three ways and returns its result.
template <auto kFunction, class... Args>
auto call(Way way, const Worker& worker, const Destination& to, Function<kFunction> token, Args&&... args) {
  switch (way) {
    case Way::kSync:
      return worker.rpc_sync(to, token, std::forward<Args>(args)...);
    case Way::kAsync:
      return worker.rpc_async(to, token, std::forward<Args>(args)...).wait();
    default:
      return worker.remote(to, token, std::forward<Args>(args)...).to_here();
  }
}
inline at::Tensor call(Way way, const Worker& worker, const Destination& to, const std::string& name,
                       const std::vector<c10::IValue>& args) {
  switch (way) {
    case Way::kSync:
      return worker.rpc_sync(to, name, args).toTensor();
    case Way::kAsync:
      return worker.rpc_async(to, name, args).wait().toTensor();
    default:
      return worker.remote(to, name, args).to_here().toTensor();
  }
}

/// Dense or sparse tensors, and how to compare and sum them.
class Kind {
 public:
  explicit Kind(bool sparse) : sparse_(sparse) {}
  bool sparse() const { return sparse_; }
  /// Differs from seed to seed.
  at::Tensor make(std::uint64_t seed, bool requires_grad = true) const {
    const auto generator = at::detail::createCPUGenerator(seed);
    at::Tensor tensor = at::randn({3, 3}, generator, at::kDouble);
    if (sparse_) {
      const at::Tensor indices = at::tensor({0, 1, 2, 0, 2, 1}, at::kLong).view({2, 3});
      tensor = at::sparse_coo_tensor(indices, at::randn({3}, generator, at::kDouble), {3, 3}).coalesce();
    }
    return tensor.set_requires_grad(requires_grad);
  }
  at::Tensor sum(const at::Tensor& x) const { return sparse_ ? at::_sparse_sum(x) : x.sum(); }

 private:
  const bool sparse_;
};

class DenseAndSparse : public ::testing::TestWithParam<bool> {
 protected:
  const Kind kind_{GetParam()};
};

inline void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_TRUE(actual.defined());
  ASSERT_TRUE(expected.defined());
  EXPECT_TRUE(at::allclose(actual.to_dense(), expected.to_dense(), 1e-12, 1e-12)) << actual << expected;
}

/// The gradients of the sum of `compute(leaves)` in this process alone.
inline Tensors expected(const Kind& kind, const Tensors& leaves,
                        const std::function<at::Tensor(const Tensors&)>& compute) {
  Tensors copies;
  for (const at::Tensor& leaf : leaves) copies.push_back(leaf.detach().clone().set_requires_grad(true));
  kind.sum(compute(copies)).backward();
  Tensors gradients;
  for (const at::Tensor& copy : copies) gradients.push_back(copy.grad());
  return gradients;
}

/// A world whose workers have autograd.
inline ClusterOptions autograd_world(int workers, FunctionTable functions = {}) {
  ClusterOptions options = world_of(workers, std::move(functions));
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<AutogradExtension>());
    return extensions;
  };
  return options;
}

inline autograd::PassCounts counts_of(const Worker& worker) {
  return worker.extension<AutogradExtension>().counts();
}

/// What the worker of that rank sent in the context, in order.
inline std::vector<GraphPart> sends_of(const ContextGraph& graph, std::uint32_t rank) {
  for (const auto& worker : graph.workers) {
    if (worker.rank != rank) continue;
    std::vector<GraphPart> sends;
    for (const GraphPart& part : worker.parts) {
      if (part.message != 0) sends.push_back(part);
    }
    return sends;
  }
  return {};
}
/// Returns the loss among the values of that worker.
inline GraphPart loss_of(const ContextGraph& graph, std::uint32_t rank) {
  for (const auto& worker : graph.workers) {
    for (const GraphPart& part : worker.parts) {
      if (worker.rank == rank && part.message == 0) return part;
    }
  }
  ADD_FAILURE() << "no loss was asked for";
  return {};
}
inline std::vector<std::uint32_t> ranks_of(const ContextGraph& graph) {
  std::vector<std::uint32_t> ranks;
  for (const auto& worker : graph.workers) ranks.push_back(worker.rank);
  return ranks;
}

}  // namespace torchspan::testing
