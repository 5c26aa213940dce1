#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/local_sgd.h>

#include "data_parallel/toy_model.h"
#include "state/api/place.h"

namespace torchspan::data_parallel::local_sgd_test {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

Tensors some_parameters(int rank) {
  return {leaf({3}, at::kDouble, 1 + rank), leaf({2, 2}, at::kFloat, 2 + rank),
          leaf({4, 3}, at::kDouble, 3 + rank)};
}

/// What an optimizer of this rank might do in this step.
void move(const Tensors& parameters, int rank, int step) {
  for (const auto& parameter : parameters) {
    at::Tensor values = parameter.detach();
    values.sub_(values.mul(0.3).add(rank + 0.1 * step).cos(), 0.1 * (1 + rank));
  }
}

Tensors mean_of(const std::vector<Tensors>& replicas, const std::vector<int>& ranks) {
  Tensors means;
  for (std::size_t p = 0; p < replicas[0].size(); ++p) {
    at::Tensor sum = at::zeros_like(replicas[0][p]);
    for (const int rank : ranks) sum = sum + replicas[static_cast<std::size_t>(rank)][p].detach();
    means.push_back(sum / static_cast<double>(ranks.size()));
  }
  return means;
}

void expect_all_close(const Tensors& got, const Tensors& wanted) {
  for (std::size_t p = 0; p < got.size(); ++p) {
    expect_close(got[p].detach(), wanted[p], tolerance(got[p].scalar_type()));
  }
}

class OtherRanks final : public state::Ranks {
 public:
  const std::string& identity() const override { return identity_; }
  int level() const override { return state::kTensorParallel; }
  int rank() const override { return 0; }
  void reduce(std::vector<double>&, bool) const override {}

 private:
  const std::string identity_ = "others";
};

TEST(ModelAverager, ResumesTheCountOfACheckpoint) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters = some_parameters(self.rank);
    ModelAverager averager(parameters, self.group, 3);
    averager.set_steps(4);
    EXPECT_FALSE(averager.step());
    EXPECT_TRUE(averager.step()) << "step 6 is due";
    EXPECT_EQ(averager.steps(), 6);
  });
}

/// Rows [2 * part, 2 * part + 2) of a parameter of shape [4, 3], among ranks that are not those of `self`.
at::Tensor rows(int part, int rank) {
  const at::Tensor tensor = leaf({2, 3}, at::kDouble, 1 + rank);
  state::set_place(tensor, std::make_shared<state::Place>(state::part_of({4, 3}, {2 * part, 0}, {2, 3},
                                                                         std::make_shared<OtherRanks>())));
  return tensor;
}

TEST(ModelAverager, AveragesPartsOverRanksThatHaveTheSamePart) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{rows(1, self.rank)};
    ModelAverager averager(parameters, self.group, 1);
    EXPECT_TRUE(averager.step());
    expect_close(parameters[0].detach(), mean_of({{rows(1, 0)}, {rows(1, 1)}}, {0, 1})[0], 1e-12);
  });
}

TEST(ModelAverager, RefusesDifferentPartsAndOwnValues) {
  on_ranks(2, [](const Rank& self) {
    EXPECT_THAT(
        error_text([&] { ModelAverager({rows(self.rank, 0)}, self.group, 1); }),
        AllOf(HasSubstr("'parameter 0' is Double"), HasSubstr("elements [0:2, 0:3] of [4, 3] on rank 0"),
              HasSubstr("elements [2:4, 0:3] of [4, 3] on rank 1"),
              HasSubstr("use a group of the ranks that have the same part")));
    EXPECT_THAT(error_text([&] { DiLoCo({rows(self.rank, 0)}, self.group); }),
                HasSubstr("use a group of the ranks that have the same part"));
    const at::Tensor own = leaf({3}, at::kDouble, 1);
    state::set_place(own, std::make_shared<state::Place>(
                              state::Place{.own = true, .among = {std::make_shared<OtherRanks>()}}));
    EXPECT_THAT(error_text([&] { ModelAverager({own}, self.group, 1); }),
                AllOf(HasSubstr("parameter 0 is this rank's own"), HasSubstr("leave it out")));
  });
}

// peer: ddp `periodic_model_averager`, `periodic_model_averager_param_group`: same, in steps after the warmup
TEST(ModelAverager, AveragesAfterEachPeriod) {
  constexpr int kSize = 3, kSteps = 9;
  on_ranks(kSize, [&](const Rank& self) {
    const Tensors parameters = some_parameters(self.rank);
    ModelAverager averager(parameters, self.group, 3, 2);
    std::vector<Tensors> replicas;
    for (int rank = 0; rank < kSize; ++rank) replicas.push_back(some_parameters(rank));
    for (int step = 1; step <= kSteps; ++step) {
      move(parameters, self.rank, step);
      for (int rank = 0; rank < kSize; ++rank) move(replicas[static_cast<std::size_t>(rank)], rank, step);
      const bool due = step > 2 && (step - 2) % 3 == 0;
      EXPECT_EQ(averager.step(), due) << step;
      if (due) {
        const Tensors means = mean_of(replicas, {0, 1, 2});
        for (auto& replica : replicas) {
          for (std::size_t p = 0; p < means.size(); ++p) replica[p].detach().copy_(means[p]);
        }
      }
      expect_all_close(parameters, replicas[static_cast<std::size_t>(self.rank)]);
    }
    EXPECT_EQ(averager.steps(), kSteps);
  });
}

// peer: ddp `3_level_hierarchical_model_averager`, `hierarchical_model_averager_warmup_steps`,
//   `1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager`: same with two levels
TEST(ModelAverager, TakesTheLongestPeriodThatIsDue) {
  on_ranks(4, [](const Rank& self) {
    const Tensors parameters = some_parameters(self.rank);
    const collective::Group near = self.group.split(self.rank / 2, self.rank);
    ModelAverager averager(parameters, {{near, 2}, {self.group, 6}});
    std::vector<Tensors> replicas;
    for (int rank = 0; rank < 4; ++rank) replicas.push_back(some_parameters(rank));
    for (int step = 1; step <= 7; ++step) {
      move(parameters, self.rank, step);
      for (int rank = 0; rank < 4; ++rank) move(replicas[static_cast<std::size_t>(rank)], rank, step);
      EXPECT_EQ(averager.step(), step % 2 == 0);
      if (step % 2 == 0) {
        const std::vector<Tensors> before = [&] {
          std::vector<Tensors> copies;
          for (const auto& replica : replicas) {
            copies.emplace_back();
            for (const auto& one : replica) copies.back().push_back(one.detach().clone());
          }
          return copies;
        }();
        for (int rank = 0; rank < 4; ++rank) {
          const std::vector<int> with =
              step % 6 == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1};
          const Tensors means = mean_of(before, with);
          for (std::size_t p = 0; p < means.size(); ++p)
            replicas[static_cast<std::size_t>(rank)][p].detach().copy_(means[p]);
        }
      }
      expect_all_close(parameters, replicas[static_cast<std::size_t>(self.rank)]);
    }
  });
}

TEST(ModelAverager, NamesWhatDiffersAndLevelsWithoutAMeaning) {
  on_ranks(2, [](const Rank& self) {
    EXPECT_THAT(error_text([&] { ModelAverager({leaf({3 + self.rank})}, self.group, 2); }),
                AllOf(HasSubstr("parameter 0"), HasSubstr("rank 1")));
    EXPECT_THAT(error_text([&] { ModelAverager({leaf({3})}, self.group, 2 + self.rank); }),
                HasSubstr("period"));
    EXPECT_THAT(error_text([&] { ModelAverager({}, self.group, 2); }), HasSubstr("no parameters"));
    EXPECT_THAT(error_text([&] { ModelAverager({at::ones({2}, at::kLong)}, self.group, 2); }),
                HasSubstr("Long"));
    EXPECT_THAT(error_text([&] { ModelAverager({leaf({3})}, self.group, 0); }), HasSubstr("period"));
    EXPECT_THAT(error_text([&] {
                  ModelAverager({leaf({3})}, {{self.group, 2}, {self.group, 3}});
                }),
                HasSubstr("a multiple of 2"));
    EXPECT_THAT(error_text([&] { ModelAverager({leaf({3})}, std::vector<AveragingLevel>{}); }),
                HasSubstr("at least one level"));
  });
}

TEST(ModelAverager, LeavesTheParametersAloneWhenARankDies) {
  if (over_shared_memory()) GTEST_SKIP() << "ranks do not die there";
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}, at::kDouble, 1 + self.rank)};
    ModelAverager averager(parameters, self.group, 1);
    if (self.rank == 1) return self.die();
    const at::Tensor before = parameters[0].detach().clone();
    EXPECT_THAT(error_text([&] { averager.step(); }), HasSubstr("1"));
    EXPECT_TRUE(at::equal(parameters[0].detach(), before));
  });
}

// peer: ddp `ddp_hook_parity_post_localSGD`: same
TEST(PostLocalSgd, AveragesGradientsOverAllRanksAtFirstAndOverTheNearOnesLater) {
  for (const bool near : {true, false}) {
    on_ranks(4, [near](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({40})};
      const collective::Group pair = self.group.split(self.rank / 2, self.rank);
      Reducer reducer(named(parameters), self.group);
      reducer.register_comm_hook(near ? post_local_sgd_hook(2, pair) : post_local_sgd_hook(2),
                                 "post_local_sgd");
      for (int i = 0; i < 4; ++i) {
        zero(parameters, true);
        Tensors wanted = expected(parameters, 4, i);
        if (i >= 2) {
          wanted.clear();
          for (const auto& parameter : parameters)
            wanted.push_back(at::zeros_like(parameter).to(at::kDouble));
          const int first = near ? self.rank / 2 * 2 : self.rank, count = near ? 2 : 1;
          for (int rank = first; rank < first + count; ++rank) {
            Tensors copies;
            for (const auto& parameter : parameters)
              copies.push_back(parameter.detach().clone().set_requires_grad(true));
            loss_of(copies, rank, i).backward();
            for (std::size_t p = 0; p < copies.size(); ++p) wanted[p] = wanted[p] + copies[p].grad() / count;
          }
        }
        step(reducer, loss_of(parameters, self.rank, i));
        for (std::size_t p = 0; p < 2; ++p) expect_close(parameters[p].grad(), wanted[p].detach(), 1e-6);
      }
    });
  }
  EXPECT_THAT(error_text([] { post_local_sgd_hook(-1); }), HasSubstr("start_iteration is -1"));
}

/// The same training in one process, parameter by parameter: one fragment for each, as its turn comes.
class DiLoCoOracle {
 public:
  DiLoCoOracle(int ranks, const DiLoCoOptions& options) : options_(options) {
    for (int rank = 0; rank < ranks; ++rank) replicas_.push_back(some_parameters(0));
    for (const auto& parameter : replicas_[0]) {
      outer_.push_back(parameter.detach().clone());
      momentum_.push_back(at::zeros_like(outer_.back()));
    }
    changes_.resize(outer_.size());
  }

  /// `turns`: the step of each parameter within a period.
  void step(int step, const std::vector<int>& turns) {
    for (std::size_t rank = 0; rank < replicas_.size(); ++rank)
      move(replicas_[rank], static_cast<int>(rank), step);
    for (std::size_t p = 0; p < outer_.size(); ++p) {
      if (step % options_.period == turns[p]) {
        at::Tensor change = at::zeros_like(outer_[p]);
        for (const auto& replica : replicas_) change = change + (outer_[p] - replica[p].detach());
        changes_[p] = {step + static_cast<int>(options_.delay),
                       change / static_cast<double>(replicas_.size())};
      }
      if (changes_[p].second.defined() && changes_[p].first == step) apply(p);
    }
  }
  void finish() {
    for (std::size_t p = 0; p < outer_.size(); ++p) {
      if (changes_[p].second.defined()) apply(p);
    }
  }
  const Tensors& replica(int rank) const { return replicas_[static_cast<std::size_t>(rank)]; }

 private:
  void apply(std::size_t p) {
    const at::Tensor change = changes_[p].second;
    changes_[p].second = at::Tensor();
    momentum_[p] = momentum_[p] * options_.outer_momentum + change;
    outer_[p] = outer_[p] - (change + momentum_[p] * options_.outer_momentum) * options_.outer_lr;
    for (auto& replica : replicas_) {
      const at::Tensor values = replica[p].detach();
      values.copy_(values * options_.keep + outer_[p] * (1 - options_.keep));
    }
  }

  const DiLoCoOptions options_;
  std::vector<Tensors> replicas_;
  Tensors outer_, momentum_;
  std::vector<std::pair<int, at::Tensor>> changes_;
};

// peer: ddp `diloco_healthy`, `streaming_diloco`: same, against one process instead of recorded numbers
TEST(DiLoCo, TrainsAsTheSameRuleInOneProcess) {
  struct Case {
    DiLoCoOptions options;
    std::vector<int> turns;
  };
  const std::vector<Case> cases = {
      {{.period = 4}, {0, 0, 0}},
      {{.period = 3, .outer_lr = 1, .outer_momentum = 0}, {0, 0, 0}},
      {{.period = 4, .fragments = 2}, {2, 2, 0}},  // 3, 4 and 12 elements
      {{.period = 4, .fragments = 2, .delay = 3, .keep = 0.25}, {2, 2, 0}},
  };
  for (const Case& one : cases) {
    on_ranks(3, [&](const Rank& self) {
      const Tensors parameters = some_parameters(self.rank);  // differ: those of rank 0 count
      DiLoCo diloco(parameters, self.group, one.options);
      DiLoCoOracle oracle(self.size, one.options);
      for (int step = 1; step <= 14; ++step) {
        move(parameters, self.rank, step);
        oracle.step(step, one.turns);
        diloco.step();
        expect_all_close(parameters, oracle.replica(self.rank));
      }
      diloco.finish();
      oracle.finish();
      expect_all_close(parameters, oracle.replica(self.rank));
    });
  }
}

/// As parameters() of a module with tied weights lists them.
TEST(DiLoCo, TakesATensorThatIsListedTwiceOnce) {
  const DiLoCoOptions options{.period = 4, .fragments = 2, .delay = 3, .keep = 0.25};
  on_ranks(2, [&](const Rank& self) {
    const Tensors parameters = some_parameters(self.rank);
    Tensors listed = parameters;
    listed.insert(listed.begin() + 1, parameters[0]);
    listed.push_back(parameters[1]);
    DiLoCo diloco(listed, self.group, options);
    DiLoCoOracle oracle(self.size, options);
    for (int step = 1; step <= 9; ++step) {
      move(parameters, self.rank, step);
      oracle.step(step, {2, 2, 0});
      diloco.step();
      expect_all_close(parameters, oracle.replica(self.rank));
    }
    diloco.finish();
    std::vector<std::string> names;
    for (const auto& [name, tensor] : diloco.state()) names.push_back(name);
    EXPECT_THAT(names, ::testing::ElementsAre("steps", "0.outer", "0.momentum", "2.outer", "2.momentum",
                                              "3.outer", "3.momentum"));
    diloco.load_state(diloco.state());
    EXPECT_EQ(diloco.steps(), 9);
  });
}

/// As parameters() of a quantized module lists them.
TEST(Averaging, LeavesTensorsOfIntegersAlone) {
  on_ranks(2, [](const Rank& self) {
    const auto listed = [&] {
      return Tensors{at::arange(3), leaf({3}, at::kDouble, 1 + self.rank), at::ones({2}, at::kBool)};
    };
    Tensors one = listed(), other = listed();
    ModelAverager averager(one, self.group, 1);
    EXPECT_TRUE(averager.step());
    expect_close(one[1].detach(), (leaf({3}, at::kDouble, 1) + leaf({3}, at::kDouble, 2)).detach() / 2,
                 1e-12);
    DiLoCo diloco(other, self.group, {.period = 1});
    EXPECT_TRUE(diloco.step());
    diloco.load_state(diloco.state());
    EXPECT_EQ(diloco.state()[1].first, "1.outer");
    for (const Tensors& tensors : {one, other}) {
      EXPECT_TRUE(tensors[0].equal(at::arange(3)));
      EXPECT_TRUE(tensors[2].equal(at::ones({2}, at::kBool)));
    }
    EXPECT_THAT(error_text([&] { ModelAverager({at::arange(3)}, self.group, 1); }),
                HasSubstr("no parameters to average"));
    EXPECT_THAT(error_text([&] {
                  DiLoCo({at::zeros({2 + self.rank}, at::kLong), leaf({3})}, self.group);
                }),
                HasSubstr("parameter 0"));
  });
}

TEST(DiLoCo, RefusesTensorsThatAreTiedOnOneRankOnly) {
  on_ranks(2, [](const Rank& self) {
    const at::Tensor one = leaf({3}), other = leaf({3});
    const Tensors listed{one, other, self.rank == 0 ? one : other};
    EXPECT_THAT(
        error_text([&] { DiLoCo(listed, self.group); }),
        AllOf(HasSubstr("the same tensor as parameter 0"), HasSubstr("the same tensor as parameter 1")));
  });
}

TEST(DiLoCo, KeepsAShareOfParametersOf16Bits) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    on_ranks(2, [&](const Rank& self) {
      const at::Tensor parameter = at::ones({3}, dtype);
      DiLoCo diloco({parameter}, self.group, {.period = 1, .outer_lr = 1, .outer_momentum = 0, .keep = 0.5});
      parameter.fill_(2 + self.rank);  // on average 2.5
      EXPECT_TRUE(diloco.step());
      expect_close(parameter, at::full({3}, (2 + self.rank + 2.5) / 2), 1e-6);
    });
  }
}

TEST(DiLoCo, ResumesToTheBit) {
  PerRank<Tensors> whole(2), resumed(2);
  for (const bool interrupt : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters = some_parameters(0);
      const DiLoCoOptions options{.period = 3, .fragments = 3, .delay = 1};
      DiLoCo diloco(parameters, self.group, options);
      for (int step = 1; step <= 11; ++step) {
        move(parameters, self.rank, step);
        diloco.step();
        if (step != 5) continue;
        diloco.finish();
        if (!interrupt) continue;
        Tensors own;
        for (const auto& parameter : parameters) own.push_back(parameter.detach().clone());
        const auto state = diloco.state();
        diloco = DiLoCo(parameters, self.group, options);  // overwrites the parameters
        diloco.load_state(state);
        for (std::size_t p = 0; p < own.size(); ++p) parameters[p].detach().copy_(own[p]);
        EXPECT_EQ(diloco.steps(), 5);
      }
      for (const auto& parameter : parameters)
        (interrupt ? resumed : whole)[self.rank].push_back(parameter.detach().clone());
    });
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (std::size_t p = 0; p < 3; ++p) EXPECT_TRUE(at::equal(whole[rank][p], resumed[rank][p]));
  }
}

TEST(DiLoCo, RejectsOptionsAndStatesWithoutAMeaningOnAllRanks) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({2})};
    const auto text_of = [&](const DiLoCoOptions& options) {
      return error_text([&] { DiLoCo(parameters, self.group, options); });
    };
    EXPECT_THAT(text_of({.period = 0}), HasSubstr("period is 0"));
    EXPECT_THAT(text_of({.period = 3, .delay = 3}), HasSubstr("from 0 to period - 1, which is 2"));
    EXPECT_THAT(text_of({.fragments = 3}), HasSubstr("from 1 to 2"));
    EXPECT_THAT(text_of({.keep = 2}), HasSubstr("keep is 2"));
    EXPECT_THAT(text_of({.period = 5 + self.rank}), HasSubstr("period"));
    EXPECT_THAT(text_of({.period = self.rank == 1 ? 0 : 5}),
                AllOf(HasSubstr("rank 1"), HasSubstr("period is 0")));
    DiLoCo diloco(parameters, self.group, {.period = 2});
    EXPECT_THAT(error_text([&] { diloco.load_state({}); }), HasSubstr("no '0.outer'"));
    auto state = diloco.state();
    for (auto& [name, tensor] : state) {
      if (name == "1.outer") tensor = at::zeros({4});
    }
    EXPECT_THAT(error_text([&] { diloco.load_state(state); }), HasSubstr("another '1.outer' of shape [2]"));
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::local_sgd_test
