// Runs the example as users do, on ratings that follow from who rates whom.
#include <CLI/CLI.hpp>
#include <algorithm>
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

#include "ddp_with_embedding/model.h"
#include "ddp_with_embedding/training.h"
#include "tests/support/processes.h"

namespace ddp_with_embedding::program_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNoise = 0.2;

void write_ratings(const std::string& file, int count) {
  constexpr unsigned kStudents = 60, kLecturers = 20;
  std::mt19937 random(7);
  std::normal_distribution<double> noise(0, kNoise);
  std::ofstream lines(file);
  lines << "s,d,service,y\n";
  for (int i = 0; i < count; ++i) {
    const unsigned student = random() % kStudents, lecturer = random() % kLecturers, service = random() % 2;
    const double taste = student % 3 == 0 ? 1 : -0.5, skill = lecturer % 4 == 0 ? -1 : 0.5;
    lines << fmt::format("{},{},{},{:.3f}\n", student, lecturer, service, 3 + taste + skill + noise(random));
  }
}

class DdpWithEmbeddingProgram : public ::testing::Test {
 protected:
  void SetUp() override { write_ratings(file_, 3000); }

  std::pair<int, std::string> run(int workers, const std::vector<std::string>& arguments) {
    std::vector<std::string> command =
        torchspan::testing::launched({"-n", std::to_string(workers)}, "ddp_with_embedding");
    if (!std::ranges::count(arguments, "--data")) command.insert(command.end(), {"--data", file_});
    command.insert(command.end(), arguments.begin(), arguments.end());
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  static double number_after(const std::string& output, const std::string& text) {
    std::smatch match;
    return std::regex_search(output, match, std::regex(text + " +([0-9.e+-]+)")) ? std::stod(match[1]) : NAN;
  }

  const torchspan::testing::TemporaryFolder folder_;
  const std::string file_ = folder_.path() + "/ratings.csv";
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

/// 100 ratings of a batch divide into 34, 33 and 33.
TEST_F(DdpWithEmbeddingProgram, TrainsBothPartsAsOneProcessWouldOnAnyNumberOfTrainers) {
  for (const int workers : {1, 2, 4, 5}) {
    SCOPED_TRACE(workers);
    const auto [code, output] =
        run(workers, {"--double", "--batch", "100", "--epochs", "8", "--table-lr", "2", "--width", "8"});
    ASSERT_EQ(code, 0) << output;
    const int trainers = std::max(1, workers - 2);
    const std::string line = fmt::format("{} trainers? against one process: ", trainers);
    for (const char* part : {"losses differ by at most", ".*the dense part by", ".*the table by"})
      EXPECT_LT(number_after(output, line + part), 1e-10) << output;
    // Ratings are sums of two effects and noise, which nothing can predict.
    EXPECT_GT(number_after(output, "the mean of all ratings"), 0.9) << output;
    EXPECT_LT(number_after(output, "this model"), 1.5 * kNoise) << output;
    EXPECT_GT(number_after(output, "this model"), 0.8 * kNoise) << output;
    EXPECT_THAT(output, HasSubstr(fmt::format("on worker{}, {} trainer", workers - 1, trainers)));
  }
}

TEST_F(DdpWithEmbeddingProgram, ReportsInvalidOptions) {
  EXPECT_THAT(run(1, {"--data", "/nowhere.csv"}).second,
              HasSubstr("cannot read /nowhere.csv: run tools/fetch-data"));
  EXPECT_THAT(run(1, {"--limit", "100", "--batch", "91"}).second,
              HasSubstr("--batch 91: there are 90 ratings to train on; lower it"));
  EXPECT_THAT(run(4, {"--batch", "1"}).second, HasSubstr("--batch 1: each of the 2 trainers needs a rating"));
  CLI::App app;
  Options options;
  add_options(app, options);
  EXPECT_THAT(app.help(), HasSubstr("--table-lr"));
  EXPECT_THROW(app.parse("--table-lr -1"), CLI::ValidationError);
  EXPECT_NO_THROW(app.parse("--table-lr 1"));
}

TEST_F(DdpWithEmbeddingProgram, EndsEveryWorkerWithAnErrorWhenTheLossIsNotFinite) {
  const auto [code, output] = run(4, {"--table-lr", "1e8", "--batch", "100"});
  EXPECT_NE(code, 0) << output;
  EXPECT_THAT(output, HasSubstr("the loss is not a finite number in epoch 1: lower --lr or --table-lr"));
  EXPECT_THAT(output, Not(HasSubstr("this model")));
}

TEST(Roles, LeaveTheMasterAndTheServerOutIfOthersCanTrain) {
  EXPECT_THAT(Roles(1).trainers, ElementsAre(0));
  EXPECT_THAT(Roles(2).trainers, ElementsAre(0));
  EXPECT_THAT(Roles(3).trainers, ElementsAre(1));
  EXPECT_THAT(Roles(5).trainers, ElementsAre(1, 2, 3));
  EXPECT_EQ(Roles(1).server, 0);
  EXPECT_EQ(Roles(5).server, 4);
}

TEST(Examples, NameRowsOfTheirStudentLecturerAndCircumstances) {
  recommender::Ratings ratings;
  ratings.students = at::tensor({1, 0}, at::kLong);
  ratings.lecturers = at::tensor({2, 1}, at::kLong);
  ratings.circumstances = at::tensor({0, 1, 1, 0, 0, 1, 0, 1}, at::kLong).view({2, 4}).to(at::kFloat);
  ratings.values = at::tensor({4.0F, 1.0F});
  ratings.student_count = 2;
  ratings.lecturer_count = 3;
  const Examples examples = examples_of(ratings, 2, true);
  EXPECT_EQ(shape_for(ratings, {}).rows, 2 + 3 + 3 * 4);
  // Student 1, lecturer 2, and lecturer 2 with the second and the third category; and so on.
  EXPECT_TRUE(examples.bags.equal(at::tensor({1, 4, 14, 15, 0, 3, 10, 12}, at::kLong).view({2, 4})));
  EXPECT_TRUE(examples.circumstances.equal(ratings.circumstances.to(at::kDouble)));
  EXPECT_TRUE(examples.values.equal(at::tensor({2.0, -1.0}, at::kDouble)));
}

}  // namespace
}  // namespace ddp_with_embedding::program_test
