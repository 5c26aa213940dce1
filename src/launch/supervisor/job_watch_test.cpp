#include "launch/supervisor/job_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/supervisor/job_fixture.h"

namespace torchspan::launch::job_watch_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class JobWatches : public Jobs {
 protected:
  std::vector<std::string> pages(const std::string& folder) const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("torchspan-stacks-")) continue;
      EXPECT_EQ(entry.status().permissions() & std::filesystem::perms::others_read,
                std::filesystem::perms::none);
      std::ifstream file(entry.path());
      all.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return all;
  }
};

/// Reports a timeout as a worker does. A shell can write to descriptors below 10 only.
constexpr const char* kNotice =
    "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; "
    R"(echo 'torchspan-timeout 1 {"kind":"collective","name":"barrier","id":9,"seconds":5}' >&9; )";

TEST_F(JobWatches, WriteOnePageForTheTimeOutsOfOneMomentAndNameItInTheSummary) {
  EXPECT_EQ(run(2, std::string(kNotice) + "exec sleep 0.5; exit 3"), 0)
      << "without a failure, there is no summary";
  EXPECT_EQ(pages(folder_).size(), 1u) << errors();
  EXPECT_THAT(errors(), Not(HasSubstr("operations that timed out")));
  EXPECT_EQ(run(2, std::string(kNotice) +
                       "touch $FOLDER/told$RANK; "
                       "while [ ! -e $FOLDER/told0 ] || [ ! -e $FOLDER/told1 ]; do sleep 0.02; done; exit 3"),
            3);
  const auto all = pages(folder_);
  ASSERT_EQ(all.size(), 2u);
  for (const std::string& page : all) {
    EXPECT_THAT(page, AllOf(HasSubstr("rank 0: 'barrier' number 9 timed out after 5.0 s\n"),
                            HasSubstr("rank 1: 'barrier' number 9 timed out after 5.0 s\n")));
  }
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("torchspan: operations that timed out\n  rank "),
                    HasSubstr("    first suspect: rank"), HasSubstr("    all workers: " + folder_)));
}

TEST_F(JobWatches, PrintNamesWithoutControlCharacters) {
  EXPECT_EQ(run(1,
                "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; "
                R"(printf '%s\n' 'torchspan-timeout 1 {"kind":"collective","name":"a\u001b[2J\nb","id":9,)"
                R"("seconds":5}' >&9; exit 3)"),
            3);
  const auto all = pages(folder_);
  ASSERT_EQ(all.size(), 1u);
  for (const std::string& text : {all[0], errors()}) {
    EXPECT_THAT(text, HasSubstr("'a [2J b' number 9"));
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
  }
}

TEST_F(JobWatches, WriteThePageBesideTheLogs) {
  JobOptions mine = options(1, std::string(kNotice) + "exit 3");
  mine.log_folder = folder_ + "/logs";
  EXPECT_EQ(run(mine), 3);
  EXPECT_EQ(pages(mine.log_folder).size(), 1u) << errors();
  EXPECT_TRUE(pages(folder_).empty());
}

TEST_F(JobWatches, SayThatThePageCannotBeWritten) {
  JobOptions mine = options(1, std::string(kNotice) + "exit 3");
  mine.log_folder = folder_ + "/logs";
  // Permissions would not stop a test that runs as root.
  mine.command[2] = "until [ -e $FOLDER/logs/worker0.err.log ]; do sleep 0.02; done; rm -r $FOLDER/logs; " +
                    mine.command[2];
  EXPECT_EQ(run(mine), 3);
  EXPECT_THAT(errors(), AllOf(HasSubstr("cannot be written: "), HasSubstr("rank 0: 'barrier' number 9")));
}

TEST_F(JobWatches, IgnoreWhatIsNoNotice) {
  EXPECT_EQ(run(1, "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; echo 'torchspan-timeout 1 {' >&9; exit 3"),
            3);
  EXPECT_TRUE(pages(folder_).empty());
}

}  // namespace
}  // namespace torchspan::launch::job_watch_test
