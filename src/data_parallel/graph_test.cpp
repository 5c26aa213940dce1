#include <gtest/gtest.h>

#include <torch/csrc/autograd/custom_function.h>

#include <torchspan/core/error.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::graph_test {
namespace {

using namespace testing;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Hidden {
  Tensors weights;
};

/// x · w₀ · w₁ …, recomputed in backward by an inner pass, which computes the gradients of the weights.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor body(at::Tensor x, const Tensors& weights) {
    for (const at::Tensor& weight : weights) x = (x * weight).tanh();
    return x;
  }
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::shared_ptr<Hidden>& hidden) {
    context->save_for_backward({x});
    context->saved_data["weights"] = c10::IValue(hidden->weights);
    return body(x, hidden->weights);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    body(x, context->saved_data["weights"].toTensorVector()).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

at::Tensor checkpoint(const at::Tensor& x, const Tensors& weights) {
  return Checkpoint::apply(x, std::make_shared<Hidden>(Hidden{weights}));
}

/// The same, but it returns the gradients of the weights to the outer pass instead of running an inner one.
struct CheckpointByHand : torch::autograd::Function<CheckpointByHand> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& a,
                            const at::Tensor& b) {
    context->save_for_backward({x, a, b});
    return Checkpoint::body(x, {a, b});
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::AutoGradMode grad_mode(true);
    Tensors copies;
    for (const at::Tensor& saved : context->get_saved_variables())
      copies.push_back(saved.detach().requires_grad_());
    return torch::autograd::grad({Checkpoint::body(copies[0], {copies[1], copies[2]})}, copies, gradients);
  }
};

/// The average over ranks of f's gradients, computed in one process.
Tensors alone(const Tensors& parameters, int size, const std::function<at::Tensor(const Tensors&, int)>& f) {
  Tensors copies;
  for (const auto& parameter : parameters)
    copies.push_back(parameter.detach().clone().set_requires_grad(true));
  for (int rank = 0; rank < size; ++rank) (f(copies, rank) / size).backward();
  Tensors gradients;
  for (const auto& copy : copies) gradients.push_back(copy.grad());
  return gradients;
}

void expect_as_alone(const Rank& self, const DataParallelOptions& options,
                     const std::function<at::Tensor(const Tensors&, int)>& f) {
  const Tensors parameters{leaf({4}), leaf({4}), leaf({4}), leaf({4})};
  Reducer reducer(named(parameters), self.group, options);
  const Tensors wanted = alone(parameters, self.size, f);
  for (int i = 0; i < 4; ++i) {
    zero(parameters, i % 2 == 0);
    step(reducer, f(parameters, self.rank));
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      ASSERT_EQ(parameters[p].grad().defined(), wanted[p].defined()) << p;
      if (wanted[p].defined()) expect_close(parameters[p].grad(), wanted[p], 1e-6);
    }
  }
}

DataParallelOptions small(DataParallelOptions options) {
  options.bucket_cap_mb = options.first_bucket_mb = 1e-6;
  return options;
}

at::Tensor input(int rank) { return leaf({4}) * (1 + rank); }

// peer: ddp ddp_checkpointing_once: same
TEST(Checkpointed, SegmentsThatUseAParameterOnceAreReduced) {
  for (const bool fixed : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      expect_as_alone(self, small({.static_graph = fixed}), [](const Tensors& p, int rank) {
        return (checkpoint(checkpoint(input(rank) * p[0], {p[1]}), {p[2]}) * p[3]).sum();
      });
    });
  }
}

// peer: ddp `find_unused_parameters_kwarg_*`: marked twice, by name: same: always names the parameters, not
//   only in a debug mode
// peer: ddp ddp_checkpointing_twice*, _weight_sharing, _unused_params, _dynamic_*: same for static graphs
//   (reentrant); dynamic ones fail with an error that names the parameter
TEST(Checkpointed, SegmentsThatShareAParameterNeedAStaticGraph) {
  const auto twice = [](const Tensors& p, int rank) {
    return (checkpoint(checkpoint(input(rank) * p[0], {p[1], p[2]}), {p[2]}) * p[3]).sum();
  };
  on_ranks(2, [&](const Rank& self) { expect_as_alone(self, small({.static_graph = true}), twice); });
  on_ranks(2, [&](const Rank& self) {
    const Tensors parameters{leaf({4}), leaf({4}), leaf({4}), leaf({4})};
    Reducer reducer(named(parameters), self.group, small({}));
    const std::string text = error_text([&] { step(reducer, twice(parameters, self.rank)); });
    EXPECT_NE(text.find("'p2'"), std::string::npos) << text;
    EXPECT_NE(text.find("static_graph"), std::string::npos) << text;
  });
}

// peer: ddp (not reentrant) `ddp_checkpointing_twice*`: same, written by hand in the test: LibTorch has no such checkpoint for
//   C++
TEST(Checkpointed, SegmentsThatGiveGradientsBackShareParametersFreely) {
  for (const bool find_unused : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      expect_as_alone(self, small({.find_unused_parameters = find_unused}), [](const Tensors& p, int rank) {
        const at::Tensor first = CheckpointByHand::apply(input(rank) * p[0], p[1], p[2]);
        return (CheckpointByHand::apply(first, p[2], p[1]) * p[3]).sum();
      });
    });
  }
}

// peer: ddp ddp_checkpointing_twice*
TEST(Checkpointed, SegmentsWithUnusedParametersNeedTheGraphStaticOrOutside) {
  on_ranks(2, [](const Rank& self) {
    expect_as_alone(self, small({.static_graph = true}), [](const Tensors& p, int rank) {
      return checkpoint(checkpoint(input(rank) * p[0], {p[1]}), {p[3]}).sum();
    });
  });
}

// peer: ddp global_local_unused_params_grad
TEST(StaticGraph, LearnsUnusedParametersAndOverlapsLater) {
  on_ranks(3, [](const Rank& self) {
    expect_as_alone(self, small({.static_graph = true}), [](const Tensors& p, int rank) {
      return (p[0] * p[2].sin() * input(rank) + p[3]).sum();
    });
  });
}

// peer: ddp different_graph_across_ranks, invalid_static_graph, static_graph_api_cpu: same, and names the
//   parameters
TEST(StaticGraph, ThatChangesFailsByName) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({4}), leaf({4})};
    Reducer reducer(named(parameters), self.group, small({.static_graph = true}));
    step(reducer, loss_of(parameters, self.rank, 0));
    zero(parameters, true);
    const std::string fewer = error_text([&] { step(reducer, loss_of({parameters[1]}, self.rank, 0)); });
    EXPECT_NE(fewer.find("'p0'"), std::string::npos) << fewer;
    EXPECT_NE(fewer.find("static_graph"), std::string::npos) << fewer;
  });
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({4}), leaf({4})};
    Reducer reducer(named(parameters), self.group, small({.static_graph = true}));
    step(reducer, loss_of({parameters[0]}, self.rank, 0));
    const std::string more = error_text([&] { step(reducer, loss_of(parameters, self.rank, 0)); });
    EXPECT_NE(more.find("'p1'"), std::string::npos) << more;
  });
}

at::Tensor looked_up(const at::Tensor& weight, std::vector<std::int64_t> rows) {
  return at::embedding(weight, at::tensor(rows), -1, false, /*sparse=*/true);
}

// peer: ddp `sparse_gradients` (+grad_is_view, hook): same
TEST(Sparse, GradientsWithDifferentRowsAreAveraged) {
  for (const bool unused : {false, true}) {
    on_ranks(3, [&](const Rank& self) {
      const Tensors parameters{leaf({6, 2}), leaf({2})};
      auto list = named(parameters);
      list[0].sparse_gradient = true;
      Reducer reducer(list, self.group, {.find_unused_parameters = unused});
      const auto loss = [](const Tensors& p, int rank) {
        std::vector<std::int64_t> rows{rank, 5};
        if (rank == 1) rows.push_back(rank);
        return (looked_up(p[0], rows) * p[1]).sum();
      };
      const Tensors wanted = alone(parameters, 3, loss);
      for (int i = 0; i < 3; ++i) {
        zero(parameters, true);
        step(reducer, loss(parameters, self.rank));
        EXPECT_TRUE(parameters[0].grad().is_sparse());
        for (std::size_t p = 0; p < 2; ++p)
          expect_close(parameters[p].grad(), wanted[p].is_sparse() ? wanted[p].to_dense() : wanted[p], 1e-6);
      }
    });
  }
}

TEST(Sparse, GradientOfADenseParameterIsRefusedByNameAndTheOtherWayRound) {
  for (const bool declared : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      auto list = named({leaf({6, 2})});
      list[0].sparse_gradient = declared;
      Reducer reducer(list, self.group);
      const std::string text = error_text(
          [&] { step(reducer, declared ? list[0].tensor.sum() : looked_up(list[0].tensor, {1}).sum()); });
      EXPECT_NE(text.find("'p0'"), std::string::npos) << text;
    });
  }
}

// peer: ddp ddp_create_graph: same, without the warning: gradients of gradients stay local
TEST(Autograd, WithCreateGraphAveragesGradientsWithoutAGraph) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3})};
      Reducer reducer(named(parameters), self.group, {.gradient_as_bucket_view = view});
      for (int i = 0; i < 3; ++i) {
        zero(parameters, true);
        const at::Tensor loss = reducer.prepare_for_backward({loss_of(parameters, self.rank, i)}).at(0);
        loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
        expect_close(parameters[0].grad().detach(), expected(parameters, 2, i)[0], 1e-6);
      }
      parameters[0].mutable_grad() = at::Tensor();  // it may refer to itself
    });
  }
}

// peer: ddp (documented) autograd
TEST(Autograd, ForSomeParametersOnlyNamesTheOthers) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({2})};
    Reducer reducer(named(parameters), self.group);
    const at::Tensor loss = reducer.prepare_for_backward({loss_of(parameters, self.rank, 0)}).at(0);
    const std::string text = error_text(
        [&] { torch::autograd::backward({loss}, {}, /*retain_graph=*/true, false, {parameters[0]}); });
    EXPECT_NE(text.find("'p1'"), std::string::npos) << text;
    EXPECT_EQ(text.find("'p0'"), std::string::npos) << text;
  });
}

/// y = w₂ tanh(w₁ x + b₁) + b₂, whose derivative by x does not depend on b₂.
at::Tensor energy(const Tensors& p, const at::Tensor& x) {
  return p[2].matmul((p[0].matmul(x) + p[1].unsqueeze(1)).tanh()) + p[3];
}

/// What a loss depends on, besides the parameters.
struct Terms {
  bool energy = false, forces = false;
};

/// The forces that the energy `y` exerts at `x`, and the energy.
at::Tensor loss_with_forces(const at::Tensor& y, const at::Tensor& x, Terms terms) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  if (terms.forces)
    loss = loss + torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0].pow(2).sum();
  return terms.energy ? loss + y.pow(2).sum() : loss;
}

/// Steps whose losses depend on derivatives of the outputs, on rank 0 as in `first`, on the others as in `other`.
void expect_averaged_derivatives(const DataParallelOptions& options, Terms first, Terms other) {
  on_ranks(2, [&](const Rank& self) {
    const auto terms = [&](int rank) { return rank == 0 ? first : other; };
    const bool every = terms(0).energy || terms(1).energy;
    const auto make = [] {
      return Tensors{leaf({4, 3}, at::kDouble), leaf({4}, at::kDouble, 0.3), leaf({2, 4}, at::kDouble, 0.7),
                     leaf({2, 1}, at::kDouble)};
    };
    const auto input = [](int rank, int step) {
      return leaf({3, 5}, at::kDouble, 0.5 + rank + 0.1 * step).detach().requires_grad_();
    };
    const Tensors parameters = make(), alone = make();
    DataParallelOptions strict = options;
    strict.unwrapped_backward = OnUnreducedBackward::kThrow;
    Reducer reducer(named(parameters), self.group, strict);
    for (int step = 0; step < 4; ++step) {
      zero(parameters, step % 2 == 0);
      zero(alone, true);
      for (int rank = 0; rank < 2; ++rank) {
        const at::Tensor x = input(rank, step), y = energy(alone, x);
        (loss_with_forces(y, x, terms(rank)) / 2).backward();
        const at::Tensor local = input(rank, 10 + step);  // accumulated first, on this rank
        if (step == 3) (loss_with_forces(energy(alone, local), local, {.forces = true}) / 2).backward();
      }
      if (step == 3) {
        const at::Tensor local = input(self.rank, 10 + step);
        const at::Tensor y =
            reducer.prepare_for_backward({energy(parameters, local)}, {.synchronize = false}).at(0);
        loss_with_forces(y, local, {.forces = true}).backward();
      }
      const at::Tensor x = input(self.rank, step);
      const at::Tensor y = reducer.prepare_for_backward({energy(parameters, x)}).at(0);
      loss_with_forces(y, x, terms(self.rank)).backward();
      for (std::size_t p = 0; p < parameters.size() - (every ? 0 : 1); ++p)
        expect_close(parameters[p].grad(), alone[p].grad(), 1e-12);
      if (!every && parameters[3].grad().defined()) {
        EXPECT_EQ(parameters[3].grad().abs().max().item<double>(), 0);
      }
    }
    EXPECT_EQ(reducer.reductions(), 4u);
  });
}

// A pass through d output / d input reaches the parameters, but not the output. Each rank once kept its own gradients.
TEST(Autograd, DerivativesOfTheOutputsByInputsAreAveraged) {
  for (const DataParallelOptions& options :
       {DataParallelOptions{.find_unused_parameters = true}, DataParallelOptions{.static_graph = true},
        DataParallelOptions{.find_unused_parameters = true, .gradient_as_bucket_view = false},
        DataParallelOptions{.find_unused_parameters = true, .partial_backward = true}})
    expect_averaged_derivatives(small(options), {.forces = true}, {.forces = true});
  expect_averaged_derivatives(small({}), {.energy = true, .forces = true}, {.energy = true, .forces = true});
}

// One rank adds the energy to the loss and the other does not.
TEST(Autograd, DerivativesOfTheOutputsMayBeTheLossOfSomeRanksOnly) {
  expect_averaged_derivatives(small({.find_unused_parameters = true}), {.energy = true, .forces = true},
                              {.forces = true});
  expect_averaged_derivatives(small({.find_unused_parameters = true}), {.energy = true}, {.forces = true});
}

TEST(Autograd, ADerivativeThatLeavesOutAParameterNamesIt) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({4, 3}, at::kDouble), leaf({4}, at::kDouble), leaf({2, 4}, at::kDouble),
                             leaf({2, 1}, at::kDouble)};
    Reducer reducer(named(parameters), self.group);
    const at::Tensor x = leaf({3, 5}, at::kDouble);
    const at::Tensor y = reducer.prepare_for_backward({energy(parameters, x)}).at(0);
    const std::string text = error_text([&] { loss_with_forces(y, x, {.forces = true}).backward(); });
    EXPECT_NE(text.find("left 1 of 4 parameters without a gradient"), std::string::npos) << text;
    EXPECT_NE(text.find("'p3'"), std::string::npos) << text;
    EXPECT_NE(text.find("set find_unused_parameters"), std::string::npos) << text;
  });
}

TEST(Autograd, RecordsInPlaceChangesOfOutputs) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group);
    const at::Tensor output = reducer.prepare_for_backward({parameters[0] * (1 + self.rank)}).at(0);
    output.mul_(4);
    output.sum().backward();
    expect_close(parameters[0].grad(), at::full({3}, 6.0), 1e-6);
  });
}

// peer: ddp (documented) `autograd::grad` never fires the hooks: same; backward with inputs fails with an
//   error that names the parameters
TEST(Autograd, GradNeverReachesTheReducer) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group);
    const at::Tensor loss = reducer.prepare_for_backward({loss_of(parameters, self.rank, 0)}).at(0);
    EXPECT_TRUE(torch::autograd::grad({loss}, {parameters[0]}, {}, /*retain_graph=*/true)[0].defined());
    EXPECT_FALSE(parameters[0].grad().defined());
    loss.backward();
    expect_close(parameters[0].grad(), expected(parameters, 2, 0)[0], 1e-6);
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::graph_test
