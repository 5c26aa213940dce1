// Runs the example as users do, on ratings whose interactions are strong enough to be learned in seconds.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <regex>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "recommender/ratings.h"
#include "tests/support/processes.h"

namespace recommender::program_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Half of the lecturers are better in one kind of course, half in the other.
void write_ratings(const std::string& file, int count) {
  constexpr unsigned kStudents = 150, kLecturers = 30;
  std::mt19937 random(7);
  std::normal_distribution<double> noise(0, 0.3);
  std::ofstream lines(file);
  lines << "s,d,service,y\n";
  for (int i = 0; i < count; ++i) {
    const unsigned student = random() % kStudents, lecturer = random() % kLecturers, service = random() % 2;
    const double taste = student % 3 == 0 ? 0.5 : 0, skill = lecturer % 5 == 0 ? -0.5 : 0;
    const double match = lecturer % 2 == service ? 1 : -1;
    lines << fmt::format("{},{},{},{:.3f}\n", student, lecturer, service,
                         3 + taste + skill + match + noise(random));
  }
}

class Recommender : public ::testing::Test {
 protected:
  void SetUp() override { write_ratings(file_, 6000); }

  std::pair<int, std::string> run(int workers, const std::vector<std::string>& arguments) {
    std::vector<std::string> command =
        torchspan::testing::launched({"-n", std::to_string(workers)}, "recommender");
    command.insert(command.end(), arguments.begin(), arguments.end());
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  static double number_after(const std::string& output, const std::string& text) {
    std::smatch match;
    return std::regex_search(output, match, std::regex(text + " +([0-9.]+)")) ? std::stod(match[1]) : NAN;
  }

  const torchspan::testing::TemporaryFolder folder_;
  const std::string file_ = folder_.path() + "/ratings.csv";
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

TEST_F(Recommender, LearnsInteractionsThatBiasesCannotModel) {
  for (const int workers : {1, 4}) {
    SCOPED_TRACE(workers);
    const auto [code, output] = run(workers, {"--data", file_, "--batch", "64", "--epochs", "8"});
    ASSERT_EQ(code, 0) << output;
    EXPECT_GT(number_after(output, "biases of students and lecturers"), 0.9) << output;
    EXPECT_LT(number_after(output, "this model"), 0.45) << output;
    EXPECT_THAT(output, HasSubstr("6000 ratings of 30 lecturers by 150 students; 600 are held out"));
    if (workers == 1) continue;
    EXPECT_THAT(output, AllOf(HasSubstr("students and circumstances on worker2, lecturers on worker3"),
                              HasSubstr("trainer 1: ")));
  }
}

TEST_F(Recommender, EndsWithAnErrorWhenTheLossIsNotFinite) {
  std::ofstream(file_, std::ios::app) << "1,1,1,1e30\n1,2,1,1e30\n1,3,1,1e30\n";
  const auto [code, output] = run(3, {"--data", file_, "--epochs", "1"});
  EXPECT_NE(code, 0) << output;
  EXPECT_THAT(output, HasSubstr("is not a finite number: lower --lr"));
}

TEST_F(Recommender, ReportsMissingRatingsBeforeItWaitsForOtherWorkers) {
  const auto [code, output] = run(4, {"--data", "/nowhere.csv"});
  EXPECT_NE(code, 0);
  EXPECT_THAT(output, HasSubstr("cannot read /nowhere.csv: run tools/fetch-data insteval.csv"));
}

std::string refusal_of(const std::string& file, const std::string& text) {
  std::ofstream(file) << text;
  try {
    load(file);
  } catch (const torchspan::Error& error) {
    return error.message();
  }
  return "";
}

TEST_F(Recommender, NamesTheInvalidLine) {
  EXPECT_THAT(refusal_of(file_, "s,d\n1,2\n"), HasSubstr("has no column 'y'"));
  EXPECT_THAT(refusal_of(file_, "s,d,y\n1,2,3\n1,2\n"), HasSubstr("line 3: 2 cells under 3 names"));
  EXPECT_THAT(refusal_of(file_, "s,d,y\n1,2,good\n"), HasSubstr("line 2: the rating is 'good'"));
  EXPECT_THAT(refusal_of(file_, "s,d,y\n1,2,3\n"), HasSubstr("has 1 ratings; it takes 20"));
}

TEST_F(Recommender, HoldsOutATenthWithoutRepetition) {
  const Ratings all = load(file_);
  EXPECT_EQ(all.circumstance_count(), 2);
  EXPECT_EQ(all.profile_count, 2);
  const Split parts = split(all, 3);
  EXPECT_EQ(parts.held_out.size(), 600);
  const at::Tensor both = std::get<0>(at::cat({parts.train.values, parts.held_out.values}).sort());
  EXPECT_TRUE(both.equal(std::get<0>(all.values.sort())));
}

/// Without priors and with a rating of every pair, biases are differences of means.
TEST_F(Recommender, BiasesAreThoseOfATwoWayTable) {
  Ratings table;
  table.students = at::tensor({0, 0, 1, 1}, at::kLong);
  table.lecturers = at::tensor({0, 1, 0, 1}, at::kLong);
  table.profiles = at::zeros({4}, at::kLong);
  table.circumstances = at::ones({4, 1});
  table.values = at::tensor({1.0F, 2.0F, 3.0F, 4.0F});
  table.student_count = table.lecturer_count = 2;
  EXPECT_NEAR(bias_only_error({table, table}, 0, 0), 0, 1e-6);
  table.values = at::tensor({1.0F, 2.0F, 3.0F, 8.0F});
  EXPECT_NEAR(bias_only_error({table, table}, 0, 0), 1, 1e-5);
}

}  // namespace
}  // namespace recommender::program_test
