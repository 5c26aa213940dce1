// Trainings of real processes over shared memory, with features combined at random, against the same training in one process
// by LibTorch. Checkpoints are files.
#include "tests/combinations/processes.h"

#include <algorithm>
#include <utility>

#include <torchspan/torchspan.h>

#include "tests/combinations/trainer.h"
#include "tests/support/cluster_main.h"

namespace torchspan::combinations::processes_test {
namespace {

void expect_saved(const Case& one, const std::string& folder, const Expected& expected) {
  const Checkpoint saved = Checkpoint::newest(folder);
  const std::vector<std::string> names = saved.names();
  const double tolerance = one.single ? 1e-4 : 1e-9;
  for (const auto& [name, wanted] : expected.model) {
    const std::string full = "model." + name;
    if (name == "own" || std::find(names.begin(), names.end(), full) == names.end())
      continue;  // a tied parameter has one of its names
    EXPECT_TRUE(at::allclose(saved.read(full), wanted, tolerance, tolerance)) << full;
  }
}

bool check(Session& session, Choices& choices, const std::string& folder) {
  const Case one(choices, choices.chance("divided", 50));
  if (one.excluded() != nullptr || one.ends()) return false;  // an end would be that of all cases
  const std::vector<Expected> expected = train_alone(one);
  int first = 0;
  for (std::size_t i = 0; i < one.phases.size(); ++i) {
    const int ranks = one.phases[i].ranks();
    {
      const TrainingRanks self(session, ranks);
      if (self.trains) {
        Trainer trainer(one, i, {session.rank(), ranks, session.runtime(), self.group, {}}, first);
        CheckpointManager manager(session, {.directory = folder, .participants = self.names});
        for (auto& [name, source] : trainer.sources()) manager.add_source(name, std::move(source));
        if (i > 0) EXPECT_EQ(manager.restore(), first);
        trainer.run(expected[i]);
        manager.save(first + one.phases[i].steps);
        manager.wait();
        if (session.rank() == 0) expect_saved(one, folder, expected[i]);
      }
    }
    session.group().barrier();
    first += one.phases[i].steps;
  }
  return true;
}

TEST(TrainingProcesses, ComputeWhatOneProcessDoes) { run_in_processes("combinations.train"); }

const testing::Scenarios kScenarios("combinations", {{"train", [] { train_in_this_process(check); }}});

}  // namespace
}  // namespace torchspan::combinations::processes_test
