// The steps of all ranks reduce the same forward, or all fail: a failure on one rank, anywhere in a step, fails
// the step on the other ranks. Several wrappers in one backward pass do not mix their gradients.
#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <random>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::lockstep_test {
namespace {

using namespace testing;
namespace nn = torch::nn;

/// Two layers of one weight each: y = a·x, y = b·x. A rank's gradient of either is its input.
struct TwoImpl : nn::Module {
  TwoImpl() : a(register_parameter("a", at::ones({1}))), b(register_parameter("b", at::ones({1}))) {}
  at::Tensor forward(const at::Tensor& to_a, const at::Tensor& to_b) { return a * to_a + b * to_b; }
  at::Tensor a, b;
};
TORCH_MODULE(Two);

at::Tensor fed(double value) { return at::full({1}, value); }
double averaged(const at::Tensor& parameter) {
  return parameter.grad().defined() ? parameter.grad().item<double>() : -1;
}

/// A module around a `Two` that another module contains too.
struct PairImpl : nn::Module {
  explicit PairImpl(Two common) : two(register_module("two", std::move(common))) {}
  at::Tensor forward(const at::Tensor& to_a, const at::Tensor& to_b) { return two(to_a, to_b) * 2; }
  Two two{nullptr};
};
TORCH_MODULE(Pair);

// Two wrappers share parameters, and one loss goes through both. The average of the first was once written to
// `.grad` while the second read its gradient there, so it averaged a mixture. Rank 0 is always late here,
// because its first hook waits.
TEST(Lockstep, AParameterOfTwoWrappersInOneBackwardGetsOneAverage) {
  for (const bool view : {true, false}) {
    for (const bool fixed : {true, false}) {
      on_ranks(2, [&](const Rank& self) {
        Two two;
        const DataParallelOptions options{.static_graph = fixed, .gradient_as_bucket_view = view};
        DistributedDataParallel one(two, self.group, options);
        DistributedDataParallel other(Pair(two), self.group, options);
        one.register_comm_hook(
            [&](const GradientBucket& bucket, const collective::Group& group) {
              bucket.buffer.mul_(1 / bucket.divisor);
              Future<at::Tensor> average = group.all_reduce(bucket.buffer);
              if (self.rank == 0) average.wait();
              return average;
            },
            "impatient");
        for (int step = 0; step < 6; ++step) {
          if (step % 2 == 0) {
            two->zero_grad();
          } else {
            for (const auto& parameter : two->parameters()) parameter.mutable_grad() = at::Tensor();
          }
          (one(fed(1 + self.rank), fed(step)) + other(fed(self.rank), fed(step))).sum().backward();
          EXPECT_EQ(averaged(two->a), 1.5 + 1) << "step " << step;
          EXPECT_EQ(averaged(two->b), 3 * step) << "step " << step;
        }
      });
    }
  }
}

// One gradient cannot be averaged over two different sets of ranks.
TEST(Lockstep, AParameterOfTwoWrappersOverDifferentRanksIsRefusedInOneBackward) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    const collective::Group alone = self.group.split(self.rank, 0);
    DistributedDataParallel all(two, self.group);
    DistributedDataParallel one(Pair(two), alone);
    const std::string text =
        error_text([&] { (all(fed(1), fed(1)) + one(fed(1 + self.rank), fed(1))).sum().backward(); });
    EXPECT_NE(text.find("is averaged by two wrappers, over ranks"), std::string::npos) << text;
    two->zero_grad();
    one(fed(1 + self.rank), fed(1)).sum().backward();
    EXPECT_EQ(averaged(two->a), 2 * (1 + self.rank)) << "each pass through one of them";
    two->zero_grad();
    all(fed(1 + self.rank), fed(1)).sum().backward();
    EXPECT_EQ(averaged(two->a), 1.5);
  });
}

/// Returns the text of the exception that the program caught in a step, or an empty text.
std::string caught(const std::function<void()>& step) {
  try {
    step();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Two layers, with or without a buffer, whose forward throws on demand.
struct FragileImpl : nn::Module {
  explicit FragileImpl(bool buffered) : two(register_module("two", Two())) {
    if (buffered) seen = register_buffer("seen", at::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& to_a) {
    if (seen.defined()) seen.add_(1);
    if (throws) throw std::runtime_error("no such image");
    return uses_b ? two(to_a, to_a) : two->a * to_a;
  }
  Two two{nullptr};
  at::Tensor seen;
  bool throws = false, uses_b = true;
};
TORCH_MODULE(Fragile);

/// Eight steps; in the third, `break_on_rank_1` makes rank 1 fail. Programs catch the error and continue. All
/// ranks fail in that step, and in no other.
void expect_one_void_step(bool buffered, const std::string& why, const std::string& expected,
                          const std::function<at::Tensor(DistributedDataParallel<Fragile>&, bool)>& loss) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    on_ranks(
        3,
        [&](const Rank& self) {
          Fragile net(buffered);
          DistributedDataParallel model(net, self.group);
          for (int step = 0; step < 8; ++step) {
            const std::string text = caught([&] {
              net->zero_grad();
              const bool breaks = step == 2 && self.rank == 1;
              (loss(model, breaks) * (1 + self.rank + step)).sum().backward();
            });
            if (step == 2) {
              const std::string& wanted = self.rank == 1 ? why : expected;
              EXPECT_NE(text.find(wanted), std::string::npos) << "rank " << self.rank << ": " << text;
              EXPECT_EQ(text.find("rank 1 gave up") != std::string::npos, self.rank != 1) << text;
            } else {
              EXPECT_EQ(text, "") << "step " << step << " on rank " << self.rank;
              EXPECT_EQ(averaged(net->two->a), 2 + step) << "step " << step << " on rank " << self.rank;
            }
          }
        },
        seed);
  }
}

at::Tensor explosive(const at::Tensor& tensor, bool breaks) {
  if (breaks) {
    tensor.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the gradient exploded"); });
  }
  return tensor;
}

// The forward of one rank throws, and its program skips the batch. The other ranks, in that step's reduction,
// once reduced with the gradients of its next step, and so in all later steps.
TEST(Lockstep, AForwardThatThrowsOnOneRankFailsThatStepOnAll) {
  for (const bool buffered : {false, true}) {
    expect_one_void_step(buffered, "no such image", "its forward threw: no such image",
                         [](DistributedDataParallel<Fragile>& model, bool breaks) {
                           model.module()->throws = breaks;
                           return model(fed(1));
                         });
  }
}

// A node that computed the module's input throws in backward, while reductions are already running.
TEST(Lockstep, ABackwardThatThrowsBehindTheModuleFailsThatStepOnAll) {
  for (const bool buffered : {false, true}) {
    expect_one_void_step(buffered, "the gradient exploded", "abandoned this backward pass",
                         [](DistributedDataParallel<Fragile>& model, bool breaks) {
                           const at::Tensor made = explosive(fed(1).requires_grad_() * 1, breaks);
                           return model(made);
                         });
  }
}

// Backward throws in the loss, before it reaches the wrapped module, which does not notice the pass.
TEST(Lockstep, ABackwardThatThrowsBeforeTheModuleFailsThatStepOnAll) {
  for (const bool buffered : {false, true}) {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      SCOPED_TRACE(seed);
      on_ranks(
          3,
          [&](const Rank& self) {
            Fragile net(buffered);
            DistributedDataParallel model(net, self.group);
            for (int step = 0; step < 8; ++step) {
              const bool breaks = step == 2 && self.rank == 1;
              const std::string text = caught([&] {
                net->zero_grad();
                explosive(model(fed(1 + self.rank + step)) * 1, breaks).sum().backward();
              });
              if (step != 2) {
                EXPECT_EQ(text, "");
                EXPECT_EQ(averaged(net->two->a), 2 + step) << "step " << step << " on rank " << self.rank;
              } else if (self.rank == 1) {
                EXPECT_NE(text.find("the gradient exploded"), std::string::npos) << text;
              } else {
                EXPECT_NE(text.find("rank 1 gave up"), std::string::npos) << text;
                EXPECT_NE(text.find("an exception discarded the outputs of its forward"), std::string::npos)
                    << text;
              }
            }
          },
          seed);
    }
  }
}

/// Where rank 1 throws in the third of eight steps, and where the ranks decide together whether to skip the step.
enum class Decision : std::uint8_t {
  kAfterBackwardByProgram,  ///< the program reduces a flag, when backward has returned
  kAfterBackward,           ///< agree(), when backward has returned
  kBeforeBackward,          ///< agree(), between forward and backward
};

/// All ranks skip the third step and train the others as one process does that never sees that batch.
void expect_one_skipped_step(Decision decision, bool keeps_outputs, const DataParallelOptions& options,
                             bool buffered) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    on_ranks(
        3,
        [&](const Rank& self) {
          Fragile net(buffered);
          DistributedDataParallel model(net, self.group, options);
          for (int step = 0; step < 8; ++step) {
            net->zero_grad();
            at::Tensor kept;
            bool ok = true;
            const auto backward = [&] { (kept * (1 + self.rank + step)).sum().backward(); };
            const std::string text = caught([&] {
              {
                const auto local = model.no_sync();
                (model(fed(1)) * 3).sum().backward();
              }
              at::Tensor output = model(fed(1));
              if (keeps_outputs) kept = output;
              if (step == 2 && self.rank == 1) throw std::runtime_error("the loss is not a number");
              kept = output;
              if (decision != Decision::kBeforeBackward) backward();
            });
            ok = text.empty();
            if (decision == Decision::kAfterBackwardByProgram) {
              ok = self.group.all_reduce(at::full({1}, ok ? 1 : 0, at::kInt), collective::kMin)
                       .wait()
                       .item<int>() != 0;
            } else {
              ok = model.agree(ok);
            }
            EXPECT_EQ(ok, step != 2) << "rank " << self.rank << ", step " << step << ": " << text;
            if (step == 2 && self.rank != 1 && decision != Decision::kBeforeBackward) {
              EXPECT_NE(text.find("rank 1 gave up its backward pass"), std::string::npos) << text;
            }
            if (!ok) continue;
            if (decision == Decision::kBeforeBackward) backward();
            EXPECT_EQ(averaged(net->two->a), 3 + 2 + step) << "step " << step << " on rank " << self.rank;
          }
        },
        seed);
  }
}

// The other ranks wait in backward for a rank that waits for them in an all-reduce of the program. They once did so
// until the group's timeout, because they were notified at the next forward only.
TEST(Lockstep, AnExceptionBetweenForwardAndBackwardReachesTheOtherRanksAtOnce) {
  for (const bool buffered : {false, true}) {
    for (const DataParallelOptions& options :
         {DataParallelOptions{}, DataParallelOptions{.find_unused_parameters = true},
          DataParallelOptions{.static_graph = true}, DataParallelOptions{.gradient_as_bucket_view = false}})
      expect_one_skipped_step(Decision::kAfterBackwardByProgram, false, options, buffered);
  }
}

// The exception ends the program of its rank, whose death the others are to notice where they wait.
TEST(Lockstep, ARankThatLeavesWithItsExceptionDoesNotWaitForRanksThatAreNotInBackward) {
  if (over_shared_memory()) GTEST_SKIP() << "ranks do not die there";
  on_ranks(3, [&](const Rank& self) {
    const std::string text = caught([&] {
      Fragile net(true);
      DistributedDataParallel model(net, self.group);
      const at::Tensor loss = model(fed(1)).sum();
      if (self.rank == 1) throw std::runtime_error("not a number");
      self.group.all_reduce(loss.detach().clone()).wait();
      loss.backward();
    });
    EXPECT_NE(text.find(self.rank == 1 ? "not a number" : "rank 1"), std::string::npos) << text;
    if (self.rank == 1) self.die();
  });
}

struct TwoHeadsImpl : nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {two->a * x, two->b * x}; }
  Two two = register_module("two", Two());
};
TORCH_MODULE(TwoHeads);

// The round waits for more passes when the exception comes.
TEST(Lockstep, AnExceptionBetweenTwoPassesOfAForwardReachesTheOtherRanksAtOnce) {
  on_ranks(3, [&](const Rank& self) {
    TwoHeads net;
    DistributedDataParallel model(net, self.group,
                                  {.find_unused_parameters = true, .partial_backward = true});
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const std::string text = caught([&] {
        const auto [first, second] = model(fed(1 + self.rank + step));
        first.sum().backward();
        if (step == 1 && self.rank == 1) throw std::runtime_error("not a number");
        second.sum().backward();
      });
      const bool ok = self.group.all_reduce(at::full({1}, text.empty() ? 1 : 0, at::kInt), collective::kMin)
                          .wait()
                          .item<int>() != 0;
      EXPECT_EQ(ok, step != 1) << text;
      if (step == 1 && self.rank != 1) {
        EXPECT_NE(text.find("rank 1 gave up its backward pass"), std::string::npos) << text;
      }
      if (ok) EXPECT_EQ(averaged(net->two->b), 2 + step);
    }
  });
}

// The exception discards outputs that need no further pass while a round waits for one. The round was once given up for
// them, so that the next pass failed on all ranks.
TEST(Lockstep, AnExceptionThatDiscardsOutputsWithoutNeedLeavesAPausedRoundAlone) {
  on_ranks(3, [&](const Rank& self) {
    TwoHeads net;
    DistributedDataParallel model(net, self.group,
                                  {.find_unused_parameters = true, .partial_backward = true});
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      at::Tensor rest;
      const std::string text = caught([&] {
        const auto earlier = model(fed(7));
        earlier.first.sum().backward();
        earlier.second.sum().backward();
        net->zero_grad();
        const auto [first, second] = model(fed(1 + self.rank + step));
        rest = second;
        first.sum().backward();
        if (self.rank == 1) throw std::runtime_error("no space left for the log");
      });
      EXPECT_EQ(text.empty(), self.rank != 1) << text;
      rest.sum().backward();
      EXPECT_EQ(averaged(net->two->a), 2 + step);
      EXPECT_EQ(averaged(net->two->b), 2 + step);
    }
  });
}

// The ranks reduce a flag between forward and backward, and skip the step. The rank whose outputs the exception discarded
// waits in a reduction that the others never begin, until the timeout.
TEST(Lockstep, ARankWhoseBackwardTheOthersSkipIsReferredToAgree) {
  if (over_shared_memory()) GTEST_SKIP() << "it would wait for a minute";
  const auto program = [](const Rank& self) {
    Fragile net(false);
    DistributedDataParallel model(net, self.group);
    std::string text;
    for (int step = 0; step < 3; ++step) {
      bool ok = true;
      at::Tensor loss;
      try {
        const at::Tensor output = model(fed(1));
        if (step == 0 && self.rank == 1) throw std::runtime_error("not a number");
        self.runtime.executor.sleep(std::chrono::seconds(1));  // of the simulated time
        loss = output.sum();
      } catch (const Error& error) {
        ok = false;
        if (text.empty()) text = error.what();
      } catch (const std::exception&) {
        ok = false;
      }
      self.group.all_reduce(at::full({1}, ok ? 1 : 0, at::kInt), collective::kMin).wait();
      EXPECT_EQ(text.empty(), step == 0 || (step == 1 && self.rank != 1)) << "step " << step << ": " << text;
    }
    EXPECT_NE(text.find("agree()"), std::string::npos) << text;
    EXPECT_EQ(text.find("rank 1 gave up its backward pass, because an exception") != std::string::npos,
              self.rank == 1)
        << text;
  };
  on_ranks(3, program, 1, torchspan::testing::InProcessOptions{.timeout = std::chrono::seconds(5)});
}

// Its timeout may be hours away.
TEST(Lockstep, ARankWhoseBackwardTheOthersSkipSaysSoWhileItWaits) {
  if (over_shared_memory()) GTEST_SKIP() << "it would wait for ten seconds";
  ::testing::internal::CaptureStderr();
  const auto program = [](const Rank& self) {
    if (self.rank == 1) self.runtime.log.set_level(LogLevel::kWarning);
    Fragile net(false);
    DistributedDataParallel model(net, self.group);
    for (int step = 0; step < 2; ++step) {
      at::Tensor loss;
      try {
        const at::Tensor output = model(fed(1));
        if (step == 0 && self.rank == 1) throw std::runtime_error("not a number");
        loss = output.sum();
      } catch (const std::exception&) {
      }
      if (self.rank == 1 || step == 0) continue;
      self.runtime.executor.sleep(std::chrono::seconds(12));  // of the simulated time
      EXPECT_NE(caught([&] { loss.backward(); }), "");
    }
  };
  on_ranks(3, program, 1, torchspan::testing::InProcessOptions{.timeout = std::chrono::seconds(60)});
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("rank 1 gave up its backward pass, because an exception discarded the outputs"),
            std::string::npos)
      << log;
  EXPECT_NE(log.find("has waited 10 s for the other ranks to begin theirs. If the ranks decide"),
            std::string::npos)
      << log;
}

/// Where a rank throws in the only step that uses `b`, after a local pass that uses it on some ranks.
enum class Failing : std::uint8_t { kLocalLoss, kForward, kLoss, kBackward };

// zero_grad(false) once left zeros on ranks that ran the failed pass, and undefined gradients on the others. Optimizers
// then stepped parameters that no rank used next on some ranks only.
TEST(Lockstep, AfterAFailedStepTheSameGradientsAreDefinedOnAllRanks) {
  for (const Failing place : {Failing::kLocalLoss, Failing::kForward, Failing::kLoss, Failing::kBackward}) {
    for (const bool view : {true, false}) {
      for (const bool agrees : {true, false}) {
        on_ranks(3, [&](const Rank& self) {
          SCOPED_TRACE(::testing::Message() << "place " << static_cast<int>(place) << ", rank " << self.rank);
          Fragile net(false);
          DistributedDataParallel model(net, self.group,
                                        {.find_unused_parameters = true, .gradient_as_bucket_view = view});
          Two two = net->two;
          const auto throw_at = [&](Failing failing) {
            if (self.rank == 1 && failing == place) throw std::runtime_error("it threw");
          };
          const auto step = [&] {
            net->uses_b = true;
            if (self.rank != 2) {
              const auto local = model.no_sync();
              const at::Tensor loss = model(fed(1)).sum();
              throw_at(Failing::kLocalLoss);
              loss.backward();
            }
            net->throws = self.rank == 1 && place == Failing::kForward;
            const at::Tensor output = model(fed(1));
            throw_at(Failing::kLoss);
            explosive(output * 1, self.rank == 1 && place == Failing::kBackward).sum().backward();
          };
          const std::string text = caught(step);
          EXPECT_NE(text, "");
          if (agrees || place == Failing::kLocalLoss) EXPECT_FALSE(model.agree(text.empty()));
          net->throws = net->uses_b = false;
          net->zero_grad(/*set_to_none=*/false);
          model(fed(1 + self.rank)).sum().backward();
          EXPECT_EQ(averaged(two->a), 2);
          EXPECT_FALSE(two->b.grad().defined());
        });
      }
    }
  }
}

// Outputs that the exception does not destroy do not show that no backward follows.
TEST(Lockstep, AgreeSkipsAStepWhetherOrNotOutputsOutliveTheException) {
  for (const bool keeps_outputs : {false, true}) {
    for (const bool find_unused : {false, true})
      expect_one_skipped_step(Decision::kAfterBackward, keeps_outputs,
                              {.find_unused_parameters = find_unused}, /*buffered=*/true);
  }
}

// The ranks that did not throw then run no backward, and must not take the other rank's notice for their next one's.
TEST(Lockstep, AgreeMayComeBeforeBackward) {
  for (const bool keeps_outputs : {false, true}) {
    for (const bool fixed : {false, true})
      expect_one_skipped_step(Decision::kBeforeBackward, keeps_outputs, {.static_graph = fixed},
                              /*buffered=*/true);
  }
}

/// Where a rank throws in a step.
enum class Place : std::uint8_t { kNowhere, kFirstLoss, kForward, kLoss, kBackward, kStep, kBetween };

/// One rank's steps, in which every rank may throw at a random place, the same for a seed. All skip a step in which any rank
/// threw, and train the others.
void skip_steps_at_random(const Rank& self, std::uint64_t seed, const DataParallelOptions& options) {
  std::mt19937_64 random(seed);
  const auto draw = [&](std::uint64_t count) { return random() % count; };
  const bool buffered = draw(2) == 0, before_backward = draw(2) == 0, keeps_outputs = draw(2) == 0;
  // Otherwise, the first pass of a step accumulates.
  const bool reduces_twice = draw(2) == 0 && !buffered && !before_backward && !options.static_graph;
  Fragile net(buffered);
  DistributedDataParallel model(net, self.group, options);
  for (int step = 0; step < 12; ++step) {
    std::vector<Place> places;
    for (int rank = 0; rank < self.size; ++rank) {
      const auto place = static_cast<Place>(1 + draw(before_backward ? 3 : reduces_twice ? 6 : 5));
      places.push_back(draw(4) == 0 ? place : Place::kNowhere);
    }
    const bool trains = std::count(places.begin(), places.end(), Place::kNowhere) == self.size;
    const Place mine = places[static_cast<std::size_t>(self.rank)];
    const auto throw_at = [&](Place place) {
      if (mine == place) throw std::runtime_error("it threw");
    };
    at::Tensor kept, loss;
    net->zero_grad();
    const std::string text = caught([&] {
      const auto first_pass = [&] {
        at::Tensor output = model(fed(1));
        throw_at(Place::kFirstLoss);
        output.sum().backward();
      };
      if (reduces_twice) {
        first_pass();
      } else {
        const auto local = model.no_sync();
        first_pass();
      }
      throw_at(Place::kBetween);
      net->throws = mine == Place::kForward;
      at::Tensor output = model(fed(1 + self.rank + step));
      if (keeps_outputs) kept = output;
      throw_at(Place::kLoss);
      loss = explosive(output * 1, mine == Place::kBackward).sum();
      if (!before_backward) loss.backward();
      throw_at(Place::kStep);
    });
    net->throws = false;
    const bool all = model.agree(text.empty());
    ASSERT_EQ(all, trains) << "step " << step << " on rank " << self.rank << ": " << text;
    if (all && before_backward) loss.backward();
    if (all) EXPECT_EQ(averaged(net->two->a), 1 + 2 + step) << "step " << step << " on rank " << self.rank;
  }
}

TEST(Lockstep, AgreeSkipsStepsInWhichRanksThrewAnywhere) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    on_ranks(
        3,
        [&](const Rank& self) {
          skip_steps_at_random(self, seed,
                               {.find_unused_parameters = seed % 3 == 0, .static_graph = seed % 3 == 1});
        },
        seed);
    if (::testing::Test::HasFailure()) break;
  }
}

// One rank skips a backward (`if (loss is not a number) continue;`). Nothing throws, so no rank can know before
// its next backward meets the others' previous one: that fails on all ranks, and then their steps agree again.
TEST(Lockstep, ABackwardThatOneRankLeavesOutFailsTheReductionThatItWasFor) {
  for (const bool find_unused : {false, true}) {
    on_ranks(3, [&](const Rank& self) {
      Fragile net(false);
      DistributedDataParallel model(net, self.group, {.find_unused_parameters = find_unused});
      int failed = 0;
      for (int step = 0; step < 6; ++step) {
        const std::string text = caught([&] {
          net->zero_grad();
          const at::Tensor loss = model(fed(1 + self.rank + step)).sum();
          if (step == 2 && self.rank == 1) return;
          loss.backward();
        });
        if (text.empty()) {
          EXPECT_TRUE(step == 2 || averaged(net->two->a) == 2 + step) << "step " << step;
          continue;
        }
        ++failed;
        EXPECT_EQ(step, self.rank == 1 ? 3 : 2);
        EXPECT_NE(text.find("rank 1 has run 4 reduced forwards and rank 0 has run 3"), std::string::npos)
            << text;
        if (self.rank == 1) --step;  // repeats that batch, which the other ranks run now
      }
      EXPECT_EQ(failed, 1);
    });
  }
}

// On each rank, the backward passes of two wrappers end in the order in which they began there: no end may wait
// for another.
TEST(TwoWrappers, MayEndTheirBackwardInADifferentOrderOnEachRank) {
  on_ranks(2, [](const Rank& self) {
    Two first, second;
    DistributedDataParallel one(first, self.group);
    DistributedDataParallel other(second, self.group);
    for (int step = 0; step < 3; ++step) {
      first->zero_grad(), second->zero_grad();
      at::Tensor a, b;
      if (self.rank == 0) a = one(fed(1), fed(2));
      b = other(fed(3 + self.rank), fed(4));
      if (self.rank == 1) a = one(fed(2), fed(2));
      (a + b).sum().backward();
      EXPECT_EQ(averaged(first->a), 1.5);
      EXPECT_EQ(averaged(second->a), 3.5);
    }
  });
}

/// A wrapper of its own for each head, of one encoder.
struct HeadImpl : nn::Module {
  explicit HeadImpl(Two encoder)
      : encoder(register_module("encoder", std::move(encoder))),
        scale(register_parameter("scale", at::ones({1}))) {}
  at::Tensor forward(double a, double b) { return encoder(fed(a), fed(b)) * scale; }
  Two encoder{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Head);

// The second wrapper once took the passes of the first for passes of the module without its wrapper.
TEST(TwoWrappers, OfOneEncoderMayHaveSeparateBackwardPasses) {
  for (const bool fixed : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      Two encoder;
      const DataParallelOptions options{.static_graph = fixed,
                                        .unwrapped_backward = OnUnreducedBackward::kThrow};
      DistributedDataParallel one(Head(encoder), self.group, options),
          other(Head(encoder), self.group, options);
      for (int step = 0; step < 4; ++step) {
        for (auto* model : {&one, &other}) {
          for (const auto& parameter : model->module()->parameters()) parameter.mutable_grad() = at::Tensor();
        }
        {
          const auto accumulated = one.no_sync();
          one(self.rank, 0).backward();
        }
        one(1 + self.rank, step).backward();
        EXPECT_EQ(averaged(encoder->a), 0.5 + 1.5) << "step " << step;
        other(3 + self.rank, step).backward();
        EXPECT_EQ(averaged(encoder->a), 2 + 3.5) << "step " << step;
        EXPECT_EQ(averaged(other.module()->scale), 3.5 + step) << "step " << step;
      }
      // Past both wrappers, it still is an error.
      EXPECT_NE(caught([&] { encoder(fed(1), fed(1)).backward(); }).find("did not go through an output"),
                std::string::npos);
    });
  }
}

TEST(TwoWrappers, OverOtherRanksDoNotExcuseAPassPastTheFirst) {
  on_ranks(2, [](const Rank& self) {
    Two encoder;
    DistributedDataParallel all(Head(encoder), self.group,
                                {.unwrapped_backward = OnUnreducedBackward::kThrow});
    DistributedDataParallel alone(Head(encoder), self.group.split(self.rank, 0));
    EXPECT_NE(caught([&] { alone(1, 1).backward(); }).find("did not go through an output"),
              std::string::npos);
  });
}

// Uneven batches without join(): the rank with more batches waits for one that has destroyed its wrapper. The
// error names that rank and suggests join().
TEST(Lockstep, ARankWithMoreBatchesIsReferredToJoin) {
  if (!over_shared_memory()) GTEST_SKIP() << "needs a group whose last handle is dropped";
  for (const bool buffered : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      const collective::Group group = self.group.split(0, self.rank);
      const std::string text = caught([&] {
        Fragile net(buffered);
        DistributedDataParallel model(net, group);
        for (int i = 0; i < 2 + self.rank; ++i) model(fed(1)).sum().backward();
      });
      if (self.rank == 0) {
        EXPECT_EQ(text, "");
      } else {
        EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
        EXPECT_NE(text.find("DistributedDataParallel::join()"), std::string::npos) << text;
      }
    });
  }
}

// If the buffers of one rank do not arrive, their step fails on all ranks.
TEST(Lockstep, ABufferHookThatFailsOnOneRankFailsThatStepOnAll) {
  on_ranks(3, [](const Rank& self) {
    Fragile net(true);
    DistributedDataParallel model(net, self.group);
    int step = 0;
    model.set_buffer_hook(
        [&](const std::vector<NamedBuffer>& buffers, const collective::Group& group) {
          Future<at::Tensor> sent = group.all_reduce(buffers[0].tensor, collective::kAvg);
          const bool breaks = step == 1 && self.rank == 1;
          return std::vector{sent.then([breaks](const Future<at::Tensor>& done) {
            if (breaks) throw Error(ErrorKind::kInvalid, "the hook failed");
            return done.wait();
          })};
        },
        "failing average");
    for (; step < 4; ++step) {
      const std::string text = caught([&] {
        net->zero_grad();
        model(fed(1 + self.rank)).sum().backward();
      });
      EXPECT_EQ(text.find("the hook failed") != std::string::npos, step == 1) << text;
      EXPECT_TRUE(step == 1 || averaged(net->two->a) == 2) << "step " << step << text;
    }
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::lockstep_test
