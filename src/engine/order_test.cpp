// Sums do not depend on the order in which gradients arrive.
#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <string_view>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include "engine/api/graph_walk.h"
#include "engine/oracle.h"
#include "engine/test_nodes.h"

namespace torchspan::engine::order_test {
namespace {

using namespace testing;

/// Five sends and a local root over a shared product and a leaf that are each used several times.
struct Graph {
  explicit Graph(bool sparse) {
    torch::manual_seed(3);
    leaf = at::randn({64, 3}).requires_grad_();
    const Tensor shared = leaf.sin();
    for (int i = 0; i < 5; ++i) {
      const Tensor factor = at::randn({64, 3});
      const Tensor rows = at::randint(0, 64, {64}, at::kLong);
      Tensor value = shared * factor + shared.exp() * leaf;
      if (sparse) value = value + at::embedding(leaf, rows, -1, false, true) * factor;
      sends.push_back(make_node<Outgoing>(std::vector<Tensor>{value, shared * i}));
    }
    loss = (leaf * at::randn({64, 3})).sum() + shared.cos().sum();
  }
  Tensor leaf, loss;
  std::vector<NodePtrTo<Outgoing>> sends;
};

struct Way {
  bool run_after_each = false;
  unsigned threads = 1;
  bool counted = false;
  bool sparse = false;
  int seal_after = 0;  ///< deliveries
};

/// The leaf's gradient when the sends' gradients arrive in that order; the last two sends get none.
Tensor gradient_by(const std::vector<std::size_t>& order, const Way& way) {
  const Graph graph(way.sparse);
  GradientMap gradients;
  MapSink sink(gradients);
  PassOptions options;
  options.threads = way.threads;
  options.enlist = [](UniqueFunction<void()> help) { help(); };
  const auto counts = std::make_shared<EdgeCounts>();
  if (way.counted) {
    for (const auto& send : graph.sends) counts->add(send);
    options.counts = counts;
  }
  const auto pass = std::make_shared<GraphPass>(sink, options);
  pass->add_root(graph.loss);
  for (std::size_t i = 0; i < graph.sends.size(); ++i) {
    if (!way.counted || i < 3) pass->add_pending(graph.sends[i]);
  }
  pass->prepare();
  torch::manual_seed(5);
  std::vector<Tensor> given;
  for (int i = 0; i < 3; ++i) given.push_back(at::randn({64, 3}));
  const Delivery nothing{{Tensor(), Tensor()}, {false, false}};
  const auto give_up = [&] {
    if (way.counted) {
      pass->seal();
    } else {
      for (std::size_t i = 3; i < 5; ++i) pass->deliver(*graph.sends[i], nothing);
    }
    if (way.run_after_each) pass->run();
  };
  for (std::size_t at = 0; at <= order.size(); ++at) {
    if (static_cast<int>(at) == way.seal_after) give_up();
    if (at == order.size()) break;
    pass->deliver(*graph.sends[order[at]], Delivery{{given[order[at]], Tensor()}, {true, order[at] == 1}});
    if (way.run_after_each) pass->run();
  }
  pass->run();
  EXPECT_TRUE(pass->finished());
  return gradients.gradient(graph.leaf);
}

TEST(SumsOfAPass, HaveTheSameBitsInAnyArrivalOrder) {
  for (const bool sparse : {false, true}) {
    const Tensor wanted = gradient_by({2, 1, 0}, {.sparse = sparse});
    std::vector<std::size_t> order{0, 1, 2};
    do {
      for (const bool run_after_each : {false, true}) {
        for (const unsigned threads : {1U, 3U}) {
          for (const bool counted : {false, true}) {
            for (const int seal_after : {0, 1, 3}) {
              expect_identical(gradient_by(order, {run_after_each, threads, counted, sparse, seal_after}),
                               wanted);
              ASSERT_FALSE(HasFailure()) << order[0] << order[1] << order[2] << " run after each "
                                         << run_after_each << " threads " << threads << " counted " << counted
                                         << " sealed after " << seal_after << " sparse " << sparse;
            }
          }
        }
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

/// The memory for early gradients is bounded: beyond the limit, gradients are added as they arrive.
TEST(SumsOfAPass, DoNotKeepAllGradientsThatArriveEarly) {
  const auto huge = at::TensorOptions().device(at::kMeta).dtype(at::kFloat);  // has no memory
  const Tensor leaf = at::empty({std::int64_t{1} << 25}, huge).requires_grad_();
  std::vector<NodePtrTo<Outgoing>> sends;
  for (int i = 0; i < 10; ++i) sends.push_back(make_node<Outgoing>(std::vector<Tensor>{leaf}));
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  for (const auto& send : sends) pass.add_pending(send);
  pass.prepare();
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> given;
  for (const auto& send : sends) {  // the last send has the first turn
    Tensor gradient = at::empty({std::int64_t{1} << 25}, huge);
    given.emplace_back(gradient.getIntrusivePtr());
    pass.deliver(*send, {std::move(gradient)});
    pass.run();
    const auto alive =
        std::count_if(given.begin(), given.end(), [](const auto& one) { return !one.expired(); });
    EXPECT_LE(alive, 3) << "each is 128 MiB";
  }
  EXPECT_TRUE(pass.finished());
  EXPECT_TRUE(gradients.gradient(leaf).defined());
}

/// Calls `act` during the first addition of a pass that was constructed while this object lived.
class DuringAddition {
 public:
  explicit DuringAddition(std::function<void()> act)
      : info_(c10::DebugInfoKind::TEST_INFO, std::make_shared<Info>(std::move(act))),
        handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&begin).scopes({at::RecordScope::FUNCTION}))) {}
  ~DuringAddition() { at::removeCallback(handle_); }
  DuringAddition(const DuringAddition&) = delete;

 private:
  struct Info : c10::DebugInfoBase {
    explicit Info(std::function<void()> act) : act(std::move(act)) {}
    std::function<void()> act;
  };
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto* info = static_cast<Info*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
    if (info == nullptr || !info->act || !std::string_view(function.name()).starts_with("aten::add"))
      return nullptr;
    std::exchange(info->act, {})();
    return nullptr;
  }

  const c10::DebugInfoGuard info_;
  const at::CallbackHandle handle_;
};

/// Another thread runs the rest of the pass while two gradients of a leaf are added. The gradients that it puts
/// aside exceed the limit when, out of turn, `unused` gets no gradient from `first`.
TEST(SumsOfAPass, BeyondTheLimitReachNoNodeThatGetsNoGradient) {
  const auto huge = at::TensorOptions().device(at::kMeta).dtype(at::kFloat);  // has no memory
  const Tensor leaf = at::empty({std::int64_t{1} << 25}, huge).requires_grad_();
  const Tensor unused = at::ones({2}).requires_grad_() * 2;
  std::vector<UniqueFunction<void()>> helpers;
  bool helped = false;
  const DuringAddition help([&] {
    for (auto& helper : std::exchange(helpers, {})) {
      helper();
      helped = true;
    }
  });
  PassOptions options;
  options.threads = 2;
  options.enlist = [&helpers](UniqueFunction<void()> helper) { helpers.push_back(std::move(helper)); };
  GradientMap gradients;
  MapSink sink(gradients);
  const auto pass = std::make_shared<GraphPass>(sink, options);
  // Nodes that were created last run first. The root that was added last has the first turn.
  const auto last = make_node<Outgoing>(std::vector<Tensor>{unused});
  const auto first = make_node<Outgoing>(std::vector<Tensor>{unused});
  std::vector<NodePtrTo<Outgoing>> sends{first, last};
  for (int i = 0; i < 5; ++i) sends.push_back(make_node<Outgoing>(std::vector<Tensor>{leaf}));
  for (const auto& send : sends) pass->add_pending(send);
  pass->prepare();
  for (const auto& send : sends) {
    const bool reached = send != first && send != last;
    Tensor gradient = reached ? at::empty({std::int64_t{1} << 25}, huge) : at::ones({2});
    pass->deliver(*send, Delivery{{std::move(gradient)}, {reached}});
  }
  pass->run();
  EXPECT_TRUE(pass->finished());
  EXPECT_TRUE(helped) << "nothing was tested";
  EXPECT_TRUE(gradients.gradient(leaf).defined());
  EXPECT_EQ(pass->report().skipped, 2U) << "the product and its leaf";
}

}  // namespace
}  // namespace torchspan::engine::order_test
