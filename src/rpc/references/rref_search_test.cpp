// Searches random schedules of the reference protocol, as a model checker does, but not completely.
// TORCHSPAN_CASES sets how many; `make long` runs a million.
#include <algorithm>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <random>

#include "rpc/references/rref_world.h"
#include "tests/support/environment.h"

namespace torchspan::rpc::testing::rref_search_test {
namespace {

std::size_t workers_of(std::uint64_t seed) { return 3 + seed % 4; }

/// Makes a random schedule. Some have no crashes, some no losses, so that failures that need neither show
/// without them.
RRefSchedule schedule_of(std::uint64_t seed) {
  using Kind = RRefStep::Kind;
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u + 1);
  std::vector<Kind> choices;
  const auto add = [&](Kind kind, std::size_t weight) { choices.insert(choices.end(), weight, kind); };
  add(Kind::kDeliver, 12 + random() % 24);
  add(Kind::kCreate, 4);
  add(Kind::kOwnValue, 2);
  add(Kind::kShare, 6 + random() % 16);
  add(Kind::kDrop, 3 + random() % 8);
  if (random() % 2 == 0) add(Kind::kShareFails, 1);
  if (random() % 2 == 0) add(Kind::kGiveUp, 2);
  if (random() % 2 == 0) {
    add(Kind::kCreateFails, 1);
    add(Kind::kRefuse, 1 + random() % 2);
  }
  if (random() % 2 == 0) {
    add(Kind::kRepeat, 1 + random() % 4);
    add(Kind::kLose, 2);
  }
  if (random() % 2 == 0) {
    add(Kind::kBreak, 1);
    add(Kind::kAudit, 2);
  }
  if (random() % 2 == 0) {
    add(Kind::kCrash, 1);
    add(Kind::kRestart, 1 + random() % 2);
    add(Kind::kMembershipEvent, 2 + random() % 6);
  }
  RRefSchedule schedule(20 + random() % 100);
  for (RRefStep& step : schedule) {
    const auto draw = [&] { return static_cast<std::uint32_t>(random()); };
    step = {choices[random() % choices.size()], draw(), draw(), draw()};
  }
  return schedule;
}

std::string failure_of(const RRefSchedule& schedule, std::uint64_t seed) {
  return RRefWorld(workers_of(seed), seed).run(schedule);
}

/// Removes all the steps that the failure does not need, larger pieces first.
RRefSchedule minimized(RRefSchedule schedule, std::uint64_t seed) {
  for (std::size_t piece = schedule.size(); piece > 0; piece /= 2) {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t from = 0; from < schedule.size();) {
        RRefSchedule shorter = schedule;
        const auto begin = shorter.begin() + static_cast<std::ptrdiff_t>(from);
        const auto length = std::min(piece, schedule.size() - from);
        shorter.erase(begin, begin + static_cast<std::ptrdiff_t>(length));
        if (failure_of(shorter, seed).empty()) {
          from += piece;
        } else {
          schedule = std::move(shorter);
          again = true;
        }
      }
    }
  }
  return schedule;
}

TEST(RRefProtocol, KeepsItsInvariantsUnderEverySchedule) {
  const auto schedules = torchspan::testing::number_from("TORCHSPAN_CASES", std::uint64_t{4'000});
  std::array<std::size_t, RRefStep::kKinds> done{};
  std::size_t messages = 0, references = 0;
  for (std::uint64_t seed = 1; seed <= schedules; ++seed) {
    const RRefSchedule schedule = schedule_of(seed);
    RRefWorld world(workers_of(seed), seed);
    const std::string failure = world.run(schedule);
    messages += world.messages();
    references += world.references();
    for (std::size_t kind = 0; kind < done.size(); ++kind) done.at(kind) += world.done().at(kind);
    if (failure.empty()) continue;
    const RRefSchedule shortest = minimized(schedule, seed);
    RRefWorld replayed(workers_of(seed), seed);
    replayed.trace();
    const std::string last = replayed.run(shortest);
    FAIL() << "seed " << seed << ", " << workers_of(seed) << " workers: " << failure << "\n"
           << shortest.size() << " of its " << schedule.size() << " steps are enough for: " << last << "\n"
           << replayed.trace_text();
  }
  for (std::size_t kind = 0; kind < done.size(); ++kind)
    EXPECT_GT(done.at(kind), schedules / 100) << "step " << kind << " was hardly ever possible";
  fmt::print("{} schedules, {} references, {:.2f} control messages each; steps done: {}\n", schedules,
             references, static_cast<double>(messages) / static_cast<double>(references), [&] {
               std::string text;
               for (const std::size_t count : done) text += fmt::format("{} ", count);
               return text;
             }());
}

}  // namespace
}  // namespace torchspan::rpc::testing::rref_search_test
