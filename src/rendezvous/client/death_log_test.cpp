#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "core/api/sim_executor.h"
#include "rendezvous/client/member_events.h"

namespace torchspan::rendezvous::death_log_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// What a log gets, by level.
struct Lines {
  std::vector<std::string> warnings, infos;
  Log log{"worker1", LogLevel::kInfo, [this](LogLevel level, const std::string& line) {
            (level == LogLevel::kWarning ? warnings : infos).push_back(line);
          }};
};

TEST(DeathLog, NamesEightOfManyDeathsOfOneCause) {
  SimExecutor executor(1);
  executor.run([&] {
    Lines lines;
    DeathLog deaths(lines.log, executor);
    deaths.write({}, "");
    EXPECT_THAT(lines.warnings, IsEmpty());
    deaths.write(std::vector<std::string>(20, "worker7 died: a host was lost"), " died: a host was lost");
    EXPECT_THAT(lines.warnings, SizeIs(9));
    EXPECT_THAT(lines.warnings.back(), HasSubstr("12 more workers died: a host was lost"));
    EXPECT_THAT(lines.infos, IsEmpty());
  });
}

TEST(DeathLog, LogsConsequencesAtLevelInfo) {
  SimExecutor executor(1);
  executor.run([&] {
    Lines lines;
    DeathLog deaths(lines.log, executor);
    for (const char* name : {"worker0 died", "worker2 died", "worker3 died"}) {
      deaths.write({name}, "");
      executor.sleep(seconds(2));
    }
    EXPECT_THAT(lines.warnings, ElementsAre(HasSubstr("worker0 died"), HasSubstr("more workers died")));
    EXPECT_THAT(lines.infos, ElementsAre(HasSubstr("worker2 died"), HasSubstr("worker3 died")));
    for (const char* name : {"worker4 died", "worker5 died"}) deaths.write({name}, "");
    EXPECT_THAT(lines.warnings, SizeIs(4));
    EXPECT_THAT(lines.warnings[2], HasSubstr("worker4 died"));
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::death_log_test
