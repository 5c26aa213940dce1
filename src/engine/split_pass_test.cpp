// peer: pipelining `stage_backward_input`, `_weight`, `_weight_shared_weights` and the other split backwards: better:
//   random graphs, equal bit for bit
#include "engine/api/split_pass.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <set>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include "engine/oracle.h"
#include "engine/random_program.h"

namespace torchspan::engine::split_pass_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;

/// A pass over the graph of some roots, with some of its leaves as the input nodes.
struct Split {
  Split(const std::vector<Tensor>& roots, const std::vector<Tensor>& inputs) : pass(sink, nodes_of(inputs)) {
    const auto root_gradients = gradients_for(roots);
    for (std::size_t i = 0; i < roots.size(); ++i)
      pass.add_root(torch::autograd::impl::gradient_edge(roots[i]), root_gradients[i]);
  }
  static std::vector<NodePtr> nodes_of(const std::vector<Tensor>& leaves) {
    std::vector<NodePtr> nodes;
    for (const Tensor& leaf : leaves) nodes.push_back(torch::autograd::impl::gradient_edge(leaf).function);
    return nodes;
  }
  void run() {
    pass.run_inputs();
    pass.run_weights();
  }
  GradientMap gradients;
  MapSink sink{gradients};
  SplitPass pass;
};

std::vector<Tensor> pick(const std::vector<Tensor>& leaves, const std::set<std::size_t>& chosen) {
  std::vector<Tensor> picked;
  for (const std::size_t leaf : chosen) picked.push_back(leaves[leaf]);
  return picked;
}

/// Checks that a pass in two parts gives each leaf the gradient that LibTorch's engine gives it: the leaves of
/// `inputs` after the first part, the others after the second.
void expect_as_one_part(const std::vector<Tensor>& values, const Program& program,
                        const std::set<std::size_t>& inputs) {
  const auto theirs = as_leaves(values), mine = as_leaves(values);
  const auto their_roots = program(theirs), my_roots = program(mine);
  torch::autograd::backward(their_roots, gradients_for(their_roots));
  Split split(my_roots, pick(mine, inputs));
  split.pass.run_inputs();
  for (std::size_t leaf = 0; leaf < values.size(); ++leaf) {
    SCOPED_TRACE(::testing::Message() << "leaf " << leaf << " after the first part");
    expect_identical(split.gradients.gradient(mine[leaf]),
                     inputs.contains(leaf) ? theirs[leaf].grad() : Tensor());
  }
  split.pass.run_weights();
  for (std::size_t leaf = 0; leaf < values.size(); ++leaf) {
    SCOPED_TRACE(::testing::Message() << "leaf " << leaf);
    expect_identical(split.gradients.gradient(mine[leaf]), theirs[leaf].grad());
    EXPECT_FALSE(mine[leaf].grad().defined());
  }
}

TEST(SplitPass, OfRandomProgramsGivesTheBitsOfAPassInOnePart) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::set<std::size_t> inputs;
    for (std::size_t leaf = 0; leaf < 8; ++leaf) {
      if (random() % 4 == 0) inputs.insert(leaf);
    }
    expect_as_one_part(
        RandomProgram::values(seed), [&](auto& leaves) { return RandomProgram(seed)(leaves); }, inputs);
    if (HasFailure()) return;
  }
}

/// One layer of a kind: its weights, and what it computes.
struct Layer {
  const char* name;
  std::vector<std::vector<std::int64_t>> weights;
  std::function<Tensor(const Tensor& x, const std::vector<Tensor>& weights)> forward;
};

constexpr std::int64_t kRows = 6, kWidth = 8;

/// Layers from matrices of kRows x kWidth to such matrices.
const std::vector<Layer>& layers() {
  using Weights = const std::vector<Tensor>&;
  static const std::vector<Layer> all{
      {"linear", {{8, 8}, {8}}, [](const Tensor& x, Weights w) { return at::linear(x, w[0], w[1]); }},
      {"one weight twice",
       {{8, 8}},
       [](const Tensor& x, Weights w) { return x.mm(w[0]).relu().mm(w[0].t()); }},
      {"convolution",
       {{2, 1, 3, 3}, {2}, {1, 2, 3, 3}},
       [](const Tensor& x, Weights w) {
         const Tensor h = at::conv2d(x.view({1, 1, 6, 8}), w[0], w[1], 1, 1).tanh();
         return at::conv2d(h, w[2], {}, 1, 1).view({6, 8});
       }},
      {"layer norm",
       {{8}, {8}},
       [](const Tensor& x, Weights w) { return at::layer_norm(x, {8}, w[0], w[1]); }},
      {"batch norm",
       {{8}, {8}},
       [](const Tensor& x, Weights w) {
         return at::batch_norm(x, w[0], w[1], {}, {}, true, 0.1, 1e-5, false);
       }},
      {"products of batches",
       {{2, 4, 4}},
       [](const Tensor& x, Weights w) {
         return x.view({2, 6, 4}).bmm(w[0]).view({6, 8});
       }},
      {"attention",
       {{8, 24}, {8, 8}},
       [](const Tensor& x, Weights w) {
         const auto parts = x.mm(w[0]).chunk(3, 1);
         return at::softmax(parts[0].mm(parts[1].t()) / 3, 1).mm(parts[2]).mm(w[1]) + x;
       }},
      {"a normalized weight",
       {{8, 8}, {8}},
       [](const Tensor& x, Weights w) { return x.mm((w[0] / w[0].norm(2, 0, true)) * w[1]); }},
      {"a position's weight", {{6, 8}}, [](const Tensor& x, Weights w) { return at::gelu(x + w[0]); }},
      {"a gate in place",
       {{8, 8}},
       [](const Tensor& x, Weights w) {
         Tensor y = x * 2;
         y.mul_(w[0].narrow(0, 0, 6).sigmoid());
         y.select(0, 2).add_(w[0].select(0, 1));
         return y;
       }},
      {"recurrent",
       {{32, 8}, {32, 8}, {32}, {32}},
       [](const Tensor& x, Weights w) {
         const Tensor zero = at::zeros({1, 1, 8});
         return std::get<0>(at::lstm(x.unsqueeze(1), {zero, zero}, w, true, 1, 0.0, true, false, false))
             .squeeze(1);
       }},
      {"a recurrent cell",
       {{24, 8}, {24, 8}, {24}, {24}},
       [](const Tensor& x, Weights w) { return at::gru_cell(x, x.tanh(), w[0], w[1], w[2], w[3]); }},
      {"custom, recomputed", {{8, 8}}, [](const Tensor& x, Weights w) { return Recomputed::apply(x, w[0]); }},
      {"custom, without a gradient",
       {{6, 8}},
       [](const Tensor& x, Weights w) { return Forgetter::apply(x, w[0]); }},
      {"custom, of two results",
       {{6, 8}},
       [](const Tensor& x, Weights w) {
         const auto both = Pair::apply(x * w[0]);
         return both[0] + both[1];
       }},
      {"a table", {{9, 8}}, [](const Tensor& x, Weights w) {
         return x * at::embedding(w[0], torch::tensor({1, 4, 1, 0, 8, 4}), -1, false, false);
       }}};
  return all;
}

/// A chain of layers; leaf 0 is its input. A layer that occurs twice uses its weights again.
struct Chain {
  explicit Chain(const std::vector<std::size_t>& order) : order(order) {
    values.push_back(at::randn({kRows, kWidth}));
    for (const std::size_t layer : order) {
      if (!first.emplace(layer, values.size()).second) continue;
      for (const auto& sizes : layers()[layer].weights) values.push_back(at::randn(sizes) / 3);
    }
  }
  std::vector<Tensor> operator()(const std::vector<Tensor>& leaves) const {
    Tensor x = leaves[0];
    for (const std::size_t layer : order) {
      const auto begin = leaves.begin() + static_cast<std::ptrdiff_t>(first.at(layer));
      const auto count = static_cast<std::ptrdiff_t>(layers()[layer].weights.size());
      x = layers()[layer].forward(x, {begin, begin + count});
    }
    return {x};
  }
  std::vector<std::size_t> order;
  std::map<std::size_t, std::size_t> first;  ///< leaf, by layer
  std::vector<Tensor> values;
};

TEST(SplitPass, OfEveryKindOfLayerGivesTheBitsOfAPassInOnePart) {
  torch::manual_seed(11);
  for (std::size_t layer = 0; layer < layers().size(); ++layer) {
    SCOPED_TRACE(layers()[layer].name);
    const Chain chain({layer, layer});
    expect_as_one_part(chain.values, chain, {0});
    expect_as_one_part(chain.values, chain, {});
  }
}

TEST(SplitPass, OfRandomChainsOfLayersGivesTheBitsOfAPassInOnePart) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    torch::manual_seed(seed);
    std::mt19937 random(seed);
    std::vector<std::size_t> order(1 + random() % 8);
    for (std::size_t& layer : order) layer = random() % layers().size();
    const Chain chain(order);
    expect_as_one_part(chain.values, chain, {0});
    if (HasFailure()) return;
  }
}

TEST(SplitPass, LeavesFrozenWeightsAlone) {
  torch::manual_seed(3);
  for (std::size_t layer = 0; layer < layers().size(); ++layer) {
    SCOPED_TRACE(layers()[layer].name);
    const Chain chain({layer, 0});
    auto theirs = as_leaves(chain.values), mine = as_leaves(chain.values);
    for (auto* leaves : {&theirs, &mine}) (*leaves)[1].requires_grad_(false);
    const auto their_roots = chain(theirs), my_roots = chain(mine);
    torch::autograd::backward(their_roots, gradients_for(their_roots));
    Split split(my_roots, {mine[0]});
    split.run();
    for (std::size_t leaf = 0; leaf < mine.size(); ++leaf)
      expect_identical(split.gradients.gradient(mine[leaf]), theirs[leaf].grad());
  }
}

/// Counts the calls of LibTorch's operators on this thread while it lives.
class OperatorCount {
 public:
  OperatorCount() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begin))) {}
  ~OperatorCount() { at::removeCallback(handle_); }
  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;
  int of(const std::string& name) const { return calls_->by_name[name]; }

 private:
  struct Calls : c10::DebugInfoBase {
    std::map<std::string, int> by_name;
  };
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto* calls = static_cast<Calls*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
    ++calls->by_name[function.name()];
    return nullptr;
  }
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
  const c10::DebugInfoGuard guard_{c10::DebugInfoKind::TEST_INFO, calls_};
  const at::CallbackHandle handle_;
};

TEST(SplitPass, DoesTheWorkOfAPassInOnePart) {
  Chain chain({0});
  chain.order.assign(8, 0);
  const auto mine = as_leaves(chain.values);
  Split split(chain(mine), {mine[0]});
  OperatorCount count;
  split.pass.run_inputs();
  EXPECT_EQ(count.of("aten::mm"), 8);
  split.pass.run_weights();
  EXPECT_EQ(count.of("aten::mm"), 16) << "one product per layer for inputs, and one for weights";
}

/// x times a factor whose memory is counted: what an activation function keeps.
Tensor keeping(const Tensor& x, int& alive) {
  auto* memory = new std::vector<float>(static_cast<std::size_t>(x.numel()), 0.5F);
  ++alive;
  return x * at::from_blob(memory->data(), x.sizes(), [memory, &alive](void*) {
           --alive;
           delete memory;
         });
}

TEST(SplitPass, FreesAfterTheFirstPartWhatOnlyInputsNeed) {
  int factors = 0, inputs_of_products = 0;
  Tensor x = at::ones({4, 4}).requires_grad_();
  const Tensor weight = at::ones({4, 4}).requires_grad_();
  Tensor y = x;
  for (int layer = 0; layer < 5; ++layer) {
    y = keeping(y, factors);
    y = (y + keeping(at::zeros({4, 4}), inputs_of_products)).mm(weight);
  }
  Split split({y}, {x});
  y = Tensor();
  ASSERT_EQ(factors, 5);
  split.pass.run_inputs();
  EXPECT_EQ(factors, 0) << "a pass in two parts keeps what only its first part needs";
  split.pass.run_weights();
  EXPECT_TRUE(split.gradients.gradient(weight).defined());
}

TEST(SplitPass, FreesEverythingAfterTheSecondPartOrWithThePass) {
  for (const bool run_weights : {true, false}) {
    int alive = 0;
    {
      const Tensor x = at::ones({4, 4}).requires_grad_(), weight = at::ones({4, 4}).requires_grad_();
      std::optional<Split> split;
      split.emplace(std::vector<Tensor>{x.mm(keeping(weight, alive))}, std::vector<Tensor>{x});
      EXPECT_EQ(alive, 1);
      split->pass.run_inputs();
      EXPECT_EQ(alive, 1) << "the weight's gradient needs it";
      if (run_weights) split->pass.run_weights();
      if (!run_weights) split.reset();
      EXPECT_EQ(alive, 0);
    }
  }
}

TEST(SplitPass, CallsEachHookOnce) {
  int tensor_hooks = 0, pre_hooks = 0, post_hooks = 0, leaf_hooks = 0, ignored = 0;
  struct CountingPreHook : torch::autograd::FunctionPreHook {
    explicit CountingPreHook(int& calls) : calls(calls) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
      ++calls;
      return {gradients[0] * 3};
    }
    int& calls;
  };
  const auto build = [&](const std::vector<Tensor>& leaves, bool counts) {
    const Tensor h = leaves[0].mm(leaves[1]);
    h.register_hook([&tensor_hooks, counts](const Tensor& gradient) {
      if (counts) ++tensor_hooks;
      return gradient * 2;
    });
    const Tensor y = h.mm(leaves[2]);
    y.grad_fn()->add_pre_hook(std::make_unique<CountingPreHook>(counts ? pre_hooks : ignored));
    const Tensor z = y.mm(leaves[1]);
    z.grad_fn()->add_post_hook(std::make_unique<CountingPostHook>(counts ? post_hooks : ignored));
    leaves[1].register_hook([&leaf_hooks, counts](const Tensor& gradient) {
      if (counts) ++leaf_hooks;
      return gradient + 1;
    });
    return std::vector<Tensor>{z};
  };
  torch::manual_seed(5);
  const std::vector<Tensor> values{at::randn({3, 3}), at::randn({3, 3}), at::randn({3, 3})};
  const auto theirs = as_leaves(values), mine = as_leaves(values);
  const auto their_roots = build(theirs, false), my_roots = build(mine, true);
  torch::autograd::backward(their_roots, gradients_for(their_roots));
  Split split(my_roots, {mine[0]});
  split.pass.run_inputs();
  EXPECT_EQ(leaf_hooks, 0);
  split.pass.run_weights();
  EXPECT_EQ(tensor_hooks, 1);
  EXPECT_EQ(pre_hooks, 1);
  EXPECT_EQ(post_hooks, 1);
  EXPECT_EQ(leaf_hooks, 1);
  for (std::size_t leaf = 0; leaf < 3; ++leaf)
    expect_identical(split.gradients.gradient(mine[leaf]), theirs[leaf].grad());
}

std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(SplitPass, FailsInTheFirstPartWithTheNodesName) {
  int alive = 0;
  const Tensor x = at::ones({4, 4}).requires_grad_(), weight = at::ones({4, 4}).requires_grad_();
  Split split({Thrower::apply(keeping(x, alive)).mm(weight)}, {x});
  std::exception_ptr ended;
  split.sink.after_pass([&](const PassStatus& status) { ended = status.error; });
  EXPECT_THAT(failure_of([&] { split.pass.run_inputs(); }), HasSubstr("the thrower threw"));
  EXPECT_TRUE(ended);
  EXPECT_EQ(alive, 0);
  EXPECT_EQ(split.gradients.size(), 0u);
  EXPECT_THAT(failure_of([&] { split.pass.run_weights(); }), HasSubstr("that has ended"));
}

TEST(SplitPass, FailsInTheSecondPartWithTheNodesName) {
  int alive = 0;
  const Tensor x = at::ones({4, 4}).requires_grad_(), weight = at::ones({4, 4}).requires_grad_();
  Split split({x.mm(Thrower::apply(keeping(weight, alive)))}, {x});
  std::exception_ptr ended;
  split.sink.after_pass([&](const PassStatus& status) { ended = status.error; });
  split.pass.run_inputs();
  EXPECT_FALSE(ended);
  const std::string text = failure_of([&] { split.pass.run_weights(); });
  EXPECT_THAT(text, HasSubstr("the thrower threw"));
  EXPECT_THAT(text, HasSubstr("Thrower"));
  EXPECT_TRUE(ended);
  EXPECT_EQ(alive, 0);
}

TEST(SplitPass, RejectsAGradientThatAHookChangesInPlaceBetweenTheParts) {
  const Tensor x = at::ones({2, 2}).requires_grad_(), weight = at::ones({2, 2}).requires_grad_();
  Split split({x + weight}, {x});
  x.register_hook([](const Tensor& gradient) { return gradient.mul_(2); });
  split.pass.run_inputs();
  EXPECT_THAT(failure_of([&] { split.pass.run_weights(); }), HasSubstr("was changed in place between"));
}

TEST(SplitPass, RejectsAWeightThatChangesInPlaceBetweenTheParts) {
  const Tensor x = at::ones({2, 2}).requires_grad_(), weight = at::ones({2, 2}).requires_grad_();
  const Tensor h = x * 3;
  Split split({h.mm(weight)}, {x});
  split.pass.run_inputs();
  {
    const torch::NoGradGuard guard;
    h.mul_(2);
  }
  EXPECT_THAT(failure_of([&] { split.pass.run_weights(); }), HasSubstr("modified by an inplace operation"));
}

TEST(SplitPass, EndsWithAnErrorIfItIsDestroyedBetweenTheParts) {
  const Tensor x = at::ones({2, 2}).requires_grad_(), weight = at::ones({2, 2}).requires_grad_();
  GradientMap gradients;
  MapSink sink(gradients);
  std::exception_ptr ended;
  sink.after_pass([&](const PassStatus& status) { ended = status.error; });
  {
    SplitPass pass(sink, Split::nodes_of({x}));
    pass.add_root(torch::autograd::impl::gradient_edge(x.mm(weight)), at::ones({2, 2}));
    pass.run_inputs();
  }
  ASSERT_TRUE(ended);
  EXPECT_EQ(to_error(ended).kind(), ErrorKind::kCancelled);
}

TEST(SplitPass, RejectsPartsInTheWrongOrderAndGradientsThatDoNotFit) {
  const Tensor x = at::ones({2, 2}).requires_grad_(), weight = at::ones({2, 2}).requires_grad_();
  Split split({x.mm(weight)}, {x});
  EXPECT_THAT(failure_of([&] { split.pass.run_weights(); }), HasSubstr("in the wrong order"));
  EXPECT_THAT(failure_of([&] { split.pass.add_root({}, at::ones({2})); }), HasSubstr("needs a node"));
  const auto edge = torch::autograd::impl::gradient_edge(x * 2);
  EXPECT_THAT(failure_of([&] {
                split.pass.add_root(edge, at::ones({3, 3}));
              }),
              HasSubstr("invalid gradient"));
  split.pass.run_inputs();
  EXPECT_THAT(failure_of([&] { split.pass.run_inputs(); }), HasSubstr("in the wrong order"));
  EXPECT_THAT(failure_of([&] { split.pass.add_root(edge, at::ones({2, 2})); }), HasSubstr("add_root()"));
  split.pass.run_weights();
  EXPECT_THAT(failure_of([&] { split.pass.run_weights(); }), HasSubstr("that has ended"));
}

TEST(SplitPass, WithoutRootsDoesNothing) {
  GradientMap gradients;
  MapSink sink(gradients);
  SplitPass pass(sink, {});
  pass.run_inputs();
  pass.run_weights();
  EXPECT_EQ(gradients.size(), 0u);
  EXPECT_TRUE(sink.end()->has_arrived());
}

}  // namespace
}  // namespace torchspan::engine::split_pass_test
