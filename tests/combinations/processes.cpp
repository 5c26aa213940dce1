#include "tests/combinations/processes.h"

#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>

#include "tests/support/cluster_main.h"

namespace torchspan::combinations {

using testing::ProcessWorld;

void train_in_this_process(const ProcessCheck& check, long cases) {
  Session session(WorkerOptions::from_env());
  train_in_this_process(session, check, cases);
}

void train_in_this_process(Session& session, const ProcessCheck& check, long cases) {
  session.runtime().log.set_level(LogLevel::kOff);
  const std::string folder = std::getenv("TEST_FOLDER");
  run_cases_together(cases, [&](Choices& choices, long seed) {
    const std::string place = fmt::format("{}/{}", folder, seed);
    const bool tried = check(session, choices, place);
    if (session.rank() == 0) std::filesystem::remove_all(place);
    return tried;
  });
  session.shutdown();
}

void run_in_processes(const std::string& scenario) {
  const testing::TemporaryFolder folder;
  ProcessWorld world(kProcesses);
  for (int rank = 0; rank < kProcesses; ++rank) world.start(rank, scenario, {{"TEST_FOLDER", folder.path()}});
  testing::expect_all_end_well(world, std::chrono::minutes(60));
}

TrainingRanks::TrainingRanks(Session& session, int ranks)
    : trains(session.rank() < ranks), group(session.group().split(trains ? 0 : 1, session.rank())) {
  for (int rank = 0; rank < ranks; ++rank) names.push_back(fmt::format("worker{}", rank));
}

}  // namespace torchspan::combinations
