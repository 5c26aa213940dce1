#include <gtest/gtest.h>
#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/pool.h>

#include "engine/oracle.h"
#include "engine/random_program.h"

namespace torchspan::engine::random_test {
namespace {

using namespace testing;

TEST(RandomPrograms, GiveTheSameGradientsToTheSameLeavesAsTheStockEngine) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    expect_as_stock(
        RandomProgram::values(seed), [&](auto& leaves) { return RandomProgram(seed)(leaves); },
        /*passes=*/1 + static_cast<int>(seed % 3));
    if (HasFailure()) return;
  }
}

/// The hops of one program: each is a send node whose gradients a receive node delivers.
struct Hops {
  struct Pair {
    NodePtrTo<Outgoing> send;
    NodePtrTo<Incoming> receive;
  };
  std::vector<Pair> pairs;
  std::function<void(Outgoing&, torch::autograd::variable_list)> deliver;

  Tensor take(const Tensor& sent) {
    Pair pair;
    pair.send = make_node<Outgoing>(std::vector<Tensor>{sent});
    pair.receive =
        make_node<Incoming>([this, send = pair.send.get()](torch::autograd::variable_list gradients) {
          deliver(*send, gradients);
        });
    pairs.push_back(pair);
    return received(sent, pair.receive);
  }

  /// The send nodes that a pass from `roots` reaches; between workers, marks determine them.
  std::unordered_set<const void*> marked(const std::vector<Tensor>& roots) const {
    std::vector<torch::autograd::Node*> walk;
    std::unordered_set<const void*> seen, sends;
    const auto visit = [&](torch::autograd::Node* node) {
      if (node && seen.insert(node).second) walk.push_back(node);
    };
    for (const Tensor& root : roots) visit(torch::autograd::impl::gradient_edge(root).function.get());
    for (std::size_t next = 0; next < walk.size(); ++next) {
      for (const auto& edge : walk[next]->next_edges()) visit(edge.function.get());
      for (const Pair& pair : pairs) {
        if (pair.receive.get() != walk[next]) continue;
        sends.insert(pair.send.get());
        visit(pair.send.get());
      }
    }
    return sends;
  }
};

/// Runs the program of `seed` with its hops as one pass. If `pool` is set, it delivers the gradients, and up
/// to `threads` of its threads drive the pass.
void run_with_hops(std::uint32_t seed, const std::shared_ptr<Pool>& pool, unsigned threads,
                   GradientMap& gradients, const std::vector<Tensor>& leaves) {
  Hops hops;
  const auto roots = RandomProgram(seed, [&](const Tensor& sent) { return hops.take(sent); })(leaves);
  MapSink sink(gradients, seed);
  // Shared, because a thread may still call run() after another thread has completed the pass.
  PassOptions options;
  options.threads = threads;
  if (pool) options.enlist = [&pool](UniqueFunction<void()> job) { pool->post(std::move(job)); };
  const auto pass = std::make_shared<GraphPass>(sink, options);
  hops.deliver = [&](Outgoing& send, torch::autograd::variable_list arrived) {
    const auto work = [pass, &send, arrived] {
      pass->deliver(send, arrived);
      pass->run();
    };
    if (pool) {
      pool->post(work);
    } else {
      work();
    }
  };
  Promise<void> ended(pool);
  sink.after_pass([&](const PassStatus& status) {
    if (status.ok()) {
      ended.set_value();
    } else {
      ended.set_error(status.error);
    }
  });
  const auto root_gradients = gradients_for(roots);
  for (std::size_t i = 0; i < roots.size(); ++i) pass->add_root(roots[i], root_gradients[i]);
  for (const auto& pair : hops.pairs) pass->add_pending(pair.send);
  pass->prepare();
  const auto marked = hops.marked(roots);
  for (const auto& pair : hops.pairs) {
    if (marked.contains(pair.send.get())) continue;
    const std::size_t inputs = pair.send->num_inputs();
    pass->deliver(*pair.send, Delivery{std::vector<Tensor>(inputs), std::vector<bool>(inputs, false)});
  }
  pass->run();
  const Future<void> future = ended.future();
  future.wait();
  EXPECT_TRUE(pass->finished());
}

void expect_hops_change_nothing(std::uint32_t seed, const std::shared_ptr<Pool>& pool, unsigned threads = 1) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const auto values = RandomProgram::values(seed);
  const auto mine = as_leaves(values), theirs = as_leaves(values);
  const auto roots = RandomProgram(seed, [](const Tensor& sent) { return sent.view_as(sent); })(theirs);
  torch::autograd::backward(roots, gradients_for(roots));
  GradientMap gradients;
  run_with_hops(seed, pool, threads, gradients, mine);
  for (std::size_t leaf = 0; leaf < values.size(); ++leaf) {
    SCOPED_TRACE(::testing::Message() << "leaf " << leaf);
    const Tensor ours = gradients.gradient(mine[leaf]), stock = theirs[leaf].grad();
    ASSERT_EQ(ours.defined(), stock.defined());
    if (!stock.defined()) continue;
    EXPECT_EQ(ours.is_sparse(), stock.is_sparse());
    const auto dense = [](const Tensor& tensor) { return tensor.is_sparse() ? tensor.to_dense() : tensor; };
    EXPECT_TRUE(at::allclose(dense(ours), dense(stock), 1e-4, 1e-4)) << dense(ours) << "\nagainst\n"
                                                                     << dense(stock);
  }
}

TEST(RandomPrograms, CutIntoSendsAndReceivesGiveTheSameGradients) {
  for (std::uint32_t seed = 1000; seed < 1200; ++seed) {
    expect_hops_change_nothing(seed, nullptr);
    if (HasFailure()) return;
  }
}

TEST(RandomPrograms, CutAndDeliveredByManyThreadsGiveTheSameGradients) {
  const auto executor = make_executor();
  const auto pool = std::make_shared<Pool>(*executor, PoolOptions{.threads = 3});
  for (std::uint32_t seed = 2000; seed < 2200; ++seed) {
    expect_hops_change_nothing(seed, pool);
    if (HasFailure()) break;
  }
  pool->stop();
}

TEST(RandomPrograms, CutAndDrivenByManyThreadsGiveTheSameGradients) {
  const auto executor = make_executor();
  const auto pool = std::make_shared<Pool>(*executor, PoolOptions{.threads = 4});
  for (std::uint32_t seed = 3000; seed < 3300; ++seed) {
    expect_hops_change_nothing(seed, pool, 2 + seed % 3);
    if (HasFailure()) break;
  }
  pool->stop();
}

/// The results have the same bits as those of one thread, in whatever order gradients are delivered and
/// however many threads drive the pass.
TEST(RandomPrograms, CutGiveTheSameBitsHoweverTheyAreDelivered) {
  const auto executor = make_executor();
  const auto pool = std::make_shared<Pool>(*executor, PoolOptions{.threads = 4});
  for (std::uint32_t seed = 4000; seed < 4200 && !HasFailure(); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const auto values = RandomProgram::values(seed);
    const auto first = as_leaves(values), second = as_leaves(values);
    GradientMap wanted, gradients;
    run_with_hops(seed, nullptr, 1, wanted, first);
    run_with_hops(seed, pool, 1 + seed % 3, gradients, second);
    for (std::size_t leaf = 0; leaf < values.size(); ++leaf) {
      SCOPED_TRACE(::testing::Message() << "leaf " << leaf);
      expect_identical(gradients.gradient(second[leaf]), wanted.gradient(first[leaf]));
    }
  }
  pool->stop();
}

}  // namespace
}  // namespace torchspan::engine::random_test
