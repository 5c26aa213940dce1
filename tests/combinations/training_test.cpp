// Trainings on one to four ranks, with features combined at random, against the same training in one process by LibTorch:
// losses, norms, parameters, and what a checkpoint in the middle brings to other ranks and other divisions.
#include <gtest/gtest.h>
#include <map>
#include <memory>

#include <torchspan/checkpoint.h>

#include "sharded/memory_state.h"
#include "tests/combinations/trainer.h"

namespace torchspan::combinations::training_test {
namespace {

using sharded::testing::MemoryState;
using testing::on_ranks;
using torchspan::testing::InProcessOptions;

/// What the ranks of a phase save.
struct Saved {
  explicit Saved(int ranks) : ranks(static_cast<std::size_t>(ranks)) {
    for (const char* name : {"model", "optimizer", "scaler", "schedule"}) writers[name].resize(this->ranks);
  }
  std::size_t ranks;
  std::map<std::string, std::vector<checkpoint::StateWriter>> writers;  ///< by source and rank
};
struct State {
  explicit State(const Saved& saved) {
    for (const auto& [name, writers] : saved.writers) parts.try_emplace(name, writers, "seen");
  }
  std::map<std::string, MemoryState> parts;
};

void expect_model(const Case& one, const MemoryState& state, const Expected& expected) {
  const double tolerance = one.single ? 1e-4 : 1e-9;
  for (const auto& [name, wanted] : expected.model) {
    if (name == "own") continue;
    const auto found = state.tensors().find(name);
    if (found == state.tensors().end()) {
      EXPECT_TRUE(name.starts_with("block")) << name << " is not saved";  // the second name of a tied one
      continue;
    }
    EXPECT_TRUE(at::allclose(found->second, wanted, tolerance, tolerance)) << name << "\n"
                                                                           << found->second << wanted;
  }
}

constexpr Duration kTimeout = std::chrono::seconds(30);

/// A rank throws where the others cannot continue: its process ends, and theirs with an error, before the group's timeout.
void expect_end(const Case& one, const Expected& wanted) {
  on_ranks(
      one.phases[0].ranks(),
      [&](const testing::Rank& self) {
        std::string text, expected;
        try {
          Trainer trainer(one, 0, self, 0);
          if (trainer.ends_training()) expected = kThrown;
          trainer.run(wanted);
          self.group.barrier();
          ADD_FAILURE() << "rank " << self.rank << " goes on";
        } catch (const std::exception& error) {
          text = error.what();
        }
        EXPECT_NE(text.find(expected), std::string::npos) << "rank " << self.rank << ": " << text;
        EXPECT_EQ(text.find("timed out"), std::string::npos) << "rank " << self.rank << ": " << text;
        self.die();
      },
      1 + one.skips, InProcessOptions{.timeout = kTimeout});
}

bool check(Choices& choices, bool sharded) {
  Case one(choices, sharded);
  if (one.excluded() != nullptr) return false;
  const std::vector<Expected> expected = train_alone(one);
  if (one.ends()) {
    expect_end(one, expected[0]);
    one.fault = Fault::kNone;
  }
  std::unique_ptr<State> state;
  int first = 0;
  for (std::size_t i = 0; i < one.phases.size(); ++i) {
    const Phase& phase = one.phases[i];
    Saved saved(phase.ranks());
    on_ranks(
        phase.ranks(),
        [&](const testing::Rank& self) {
          Trainer trainer(one, i, self, first);
          for (const auto& [name, source] : trainer.sources()) {
            if (state) source->load(state->parts.at(name));
          }
          trainer.run(expected[i]);
          for (const auto& [name, source] : trainer.sources())
            source->save(saved.writers.at(name)[static_cast<std::size_t>(self.rank)]);
          self.group.barrier();
        },
        1 + one.skips, InProcessOptions{.timeout = kTimeout});
    state = std::make_unique<State>(saved);
    expect_model(one, state->parts.at("model"), expected[i]);
    first += phase.steps;
  }
  return true;
}

TEST(Trainings, WithReplicasAndDividedOptimizersAreThoseOfOneProcess) {
  run_cases(60, [](Choices& choices) { return check(choices, false); });
}

TEST(Trainings, WithShardedParametersAreThoseOfOneProcess) {
  run_cases(60, [](Choices& choices) { return check(choices, true); });
}

}  // namespace
}  // namespace torchspan::combinations::training_test
