#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::skip_connections_test {
namespace {

using ::testing::HasSubstr;

/// Stashes a changed copy of its input.
struct StashImpl : DenseImpl {
  using DenseImpl::DenseImpl;
  at::Tensor forward(const at::Tensor& x, Skips& skips) {
    const at::Tensor y = DenseImpl::forward(x);
    skips.stash("skip", y * 0.5);
    return y;
  }
};
TORCH_MODULE(Stash);
struct PopImpl : DenseImpl {
  using DenseImpl::DenseImpl;
  at::Tensor forward(const at::Tensor& x, Skips& skips) {
    const at::Tensor y = DenseImpl::forward(x);
    return y + skips.pop("skip");
  }
};
TORCH_MODULE(Pop);

// The peer's test_gpipe: 1to3 in all its balances and modes.
// peer: pipe test_skip_gpipe `1to3`, `none_skip`: same: in every way
TEST(PipelineSkips, FromTheFirstToTheThirdInEveryBalanceAndMode) {
  for (const std::vector<int>& balance : std::vector<std::vector<int>>{{3}, {1, 2}, {2, 1}, {1, 1, 1}}) {
    in_every_way([&](PipelineOptions options) {
      on_workers(static_cast<int>(balance.size()), 1, [&](Worker& worker) {
        Layers layers;
        layers.add<Stash>(1u).stashes("skip");
        layers.add<Dense>(2u);
        layers.add<Pop>(3u).pops("skip");
        options.balance = balance;
        Pipeline pipe(worker, layers, options);
        const at::Tensor x = seeded({7, kWidth}, 4).set_requires_grad(true), y = seeded({7, kWidth}, 5);
        const double loss = pipe.train_step(x, y, mean_square);

        Dense a(1u), b(2u), c(3u);
        const at::Tensor plain_x = seeded({7, kWidth}, 4).set_requires_grad(true);
        const at::Tensor first = a->forward(plain_x);
        const at::Tensor expected = mean_square(c->forward(b->forward(first)) + first * 0.5, y);
        expected.backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
        expect_gradients(pipe, {a.ptr(), b.ptr(), c.ptr()});
        if (worker.rank() == 0) expect_close(x.grad(), plain_x.grad());
        const Batch output = pipe.infer(x);
        if (worker.rank() + 1 == static_cast<int>(balance.size()))
          expect_close(output.tensor(), (c->forward(b->forward(first)) + first * 0.5).detach());
      });
    });
  }
}

// peer: pipe test_skip_gpipe 1to3
TEST(PipelineSkips, MayCarryNoTensor) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers
          .add_function("stash",
                        [](const at::Tensor& x, Skips& skips) {
                          skips.stash("skip", at::Tensor());
                          return x * 2;
                        })
          .stashes("skip");
      layers.add<Dense>(1u);
      layers
          .add_function("pop",
                        [](const at::Tensor& x, Skips& skips) {
                          EXPECT_FALSE(skips.pop("skip").defined());
                          return x * 1;
                        })
          .pops("skip");
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({4, kWidth}, 4);
      Dense dense(1u);
      EXPECT_NEAR(pipe.train_step(x, x, mean_square), mean_square(dense->forward(x * 2), x).item<double>(),
                  1e-12);
    });
  });
}

// peer: pipe inner_1_to_inner_2
TEST(PipelineSkips, OfOneNameInTwoSpacesAreSeparate) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Stash>(1u).stashes("skip").in_space("outer");
      layers.add<Stash>(2u).stashes("skip").in_space("inner");
      layers.add<Dense>(3u);
      layers.add<Pop>(4u).pops("skip").in_space("inner");
      layers.add<Pop>(5u).pops("skip").in_space("outer");
      options.balance = {2, 1, 2};
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 6), y = seeded({6, kWidth}, 7);
      const double loss = pipe.train_step(x, y, mean_square);
      Dense a(1u), b(2u), c(3u), d(4u), e(5u);
      const at::Tensor outer = a->forward(x), inner = b->forward(outer);
      const at::Tensor inside = d->forward(c->forward(inner)) + inner * 0.5;
      const at::Tensor expected = mean_square(e->forward(inside) + outer * 0.5, y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
      expect_gradients(pipe, {a.ptr(), b.ptr(), c.ptr(), d.ptr(), e.ptr()});
    });
  });
}

// peer: pipe portal (`blue_orange*`, `use_grad`, `tensor_life_*`), tracker, `delete_portal_tensor`: differs:
//   a skip is an ordinary link of the plan, so there are no tensor lifetimes to count
TEST(PipelineSkips, MayBeTheOnlyPathOfAGradient) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Stash>(1u).stashes("skip");
      layers.add_function("cut", [](const at::Tensor& x) { return x.detach(); });
      layers.add<Pop>(3u).pops("skip");
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 6), y = seeded({6, kWidth}, 7);
      pipe.train_step(x, y, mean_square);
      Dense a(1u), c(3u);
      const at::Tensor first = a->forward(x);
      mean_square(c->forward(first.detach()) + first * 0.5, y).backward();
      expect_gradients(pipe, {a.ptr(), nullptr, c.ptr()});
    });
  });
}

// peer: pipe portal
TEST(PipelineSkips, ThatAreTakenAndNotUsedGetNoGradient) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Stash>(1u).stashes("skip");
      layers
          .add_function("forget",
                        [](const at::Tensor& x, Skips& skips) {
                          skips.pop("skip");
                          return x * 3;
                        })
          .pops("skip");
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 6), y = seeded({6, kWidth}, 7);
      pipe.train_step(x, y, mean_square);
      Dense a(1u);
      mean_square(a->forward(x) * 3, y).backward();
      expect_gradients(pipe, {a.ptr()});
    });
  });
}

// peer: pipe portal
TEST(PipelineSkips, MayBeIntegersAndTheLayersOwnInput) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers
          .add_function("aside",
                        [](const at::Tensor& x, Skips& skips) {
                          skips.stash("signs", (x > 0).to(at::kLong));
                          skips.stash("input", x);
                          return x;
                        })
          .stashes("signs", "input");
      layers.add<Dense>(1u);
      layers
          .add_function("together", [](const at::Tensor& x,
                                       Skips& skips) { return x * skips.pop("signs") + skips.pop("input"); })
          .pops("input", "signs");
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 6).set_requires_grad(true), y = seeded({6, kWidth}, 7);
      pipe.train_step(x, y, mean_square);
      const at::Tensor plain_x = seeded({6, kWidth}, 6).set_requires_grad(true);
      Dense dense(1u);
      mean_square(dense->forward(plain_x) * (plain_x > 0).to(at::kLong) + plain_x, y).backward();
      expect_gradients(pipe, {nullptr, dense.ptr()});
      if (worker.rank() == 0) expect_close(x.grad(), plain_x.grad());
    });
  });
}

TEST(PipelineSkips, ReachALaterUseOfALayerOfAnEarlierStage) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      const auto first = layers.add<Dense>(1u);
      layers.add<Stash>(2u).stashes("skip");
      layers.reuse(first);
      layers.add<Pop>(3u).pops("skip");
      options.balance = {1, 2};
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 6), y = seeded({6, kWidth}, 7);
      pipe.train_step(x, y, mean_square);
      Dense a(1u), b(2u), c(3u);
      const at::Tensor aside = b->forward(a->forward(x));
      mean_square(c->forward(a->forward(aside)) + aside * 0.5, y).backward();
      expect_gradients(pipe, {a.ptr(), b.ptr(), c.ptr()});
    });
  });
}

/// The errors of both workers of a pipeline in a step.
std::string step_error(const std::function<void(Layers&)>& add) {
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    add(layers);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const at::Tensor x = seeded({4, kWidth}, 6);
    texts[static_cast<std::size_t>(worker.rank())] = error_text([&] { pipe.train_step(x, x, mean_square); });
  });
  EXPECT_THAT(texts[0], HasSubstr("layer '"));
  EXPECT_THAT(texts[1], HasSubstr("layer '"));
  return texts[0] + texts[1];
}

at::Tensor pass(const at::Tensor& x, Skips&) { return x * 1; }
at::Tensor stash(const at::Tensor& x, Skips& skips) {
  skips.stash("skip", x);
  return x * 1;
}
at::Tensor pop(const at::Tensor& x, Skips& skips) { return x + skips.pop("skip"); }

template <at::Tensor (*kLayer)(const at::Tensor&, Skips&)>
auto layer() {
  return [](const at::Tensor& x, Skips& skips) { return kLayer(x, skips); };
}

// peer: pipe test_stash_pop stash
TEST(PipelineSkips, ThatAreDeclaredMustBeStashedAndPopped) {
  EXPECT_THAT(
      step_error([](Layers& layers) {
        layers.add_function("lazy", layer<pass>()).stashes("skip");
        layers.add_function("pop", layer<pop>()).pops("skip");
      }),
      HasSubstr(
          "layer 'lazy' (order 0, stage 0 on 'worker0'): invalid: skips: 'skip' was declared by stashes()"));
  EXPECT_THAT(
      step_error([](Layers& layers) {
        layers.add_function("stash", layer<stash>()).stashes("skip");
        layers.add_function("lazy", layer<pass>()).pops("skip");
      }),
      HasSubstr(
          "layer 'lazy' (order 1, stage 1 on 'worker1'): invalid: skips: 'skip' was declared by pops()"));
}

// peer: pipe test_stash_pop stash
TEST(PipelineSkips, ThatAreNotDeclaredAreRefused) {
  EXPECT_THAT(step_error([](Layers& layers) {
                layers.add_function("stash", layer<stash>());
                layers.add_function("pass", layer<pass>());
              }),
              HasSubstr("'skip' is stashed but was not declared"));
  EXPECT_THAT(step_error([](Layers& layers) {
                layers.add_function("pass", layer<pass>());
                layers.add_function("pop", layer<pop>());
              }),
              HasSubstr("'skip' is popped but was not declared"));
}

TEST(PipelineSkips, ThatDoNotMatchAreFoundBeforeAnythingIsBuilt) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add_function("stash", layer<stash>()).stashes("left");
    layers.add_function("pop", layer<pop>()).pops("right");
    const std::string text = error_text([&] { Pipeline(worker, layers, {}); });
    EXPECT_THAT(text, HasSubstr("layer 'stash' (order 0) stashes 'left', which no later layer pops"));
    EXPECT_THAT(text, HasSubstr("layer 'pop' (order 1) pops 'right', which no earlier layer stashes"));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::skip_connections_test
