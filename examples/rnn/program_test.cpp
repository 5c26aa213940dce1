// Runs the example as users do, on a text that repeats.
#include <cmath>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>
#include <string>

#include <ATen/ATen.h>

#include "char_transformer/example_program.h"
#include "rnn/corpus.h"

namespace rnn::program_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class RnnProgram : public char_transformer::ExampleProgram {
 protected:
  RnnProgram()
      : ExampleProgram("rnn", {{"--width", "24"}, {"--rows", "4"}, {"--context", "12"}, {"--lr", "0.02"}},
                       "the whale — the white whale; call me ") {}

  static double number_after(const std::string& output, const std::string& text) {
    std::smatch match;
    const bool found = std::regex_search(output, match, std::regex(text + " +([0-9.e+-]+)"));
    return found ? std::stod(match[1]) : std::nan("");
  }
};

TEST_F(RnnProgram, TrainsAsLibTorchInOneProcessWhereverItsPartsAre) {
  for (const int workers : {1, 2, 3}) {
    SCOPED_TRACE(workers);
    const Outcome outcome = run(workers, {{"--steps", "120"}, {"--double", ""}});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_LT(number_after(outcome.output, "the losses of the 120 steps differ by at most"), 1e-10)
        << outcome.output;
    // The text has more order than pairs of characters show.
    const double pairs = number_after(outcome.output, "frequencies of pairs");
    EXPECT_GT(pairs, 0.3) << outcome.output;
    EXPECT_LT(number_after(outcome.output, "this model"), pairs) << outcome.output;
    EXPECT_NEAR(number_after(outcome.output, "this model, trained in one process"),
                number_after(outcome.output, "this model"), 1e-3)
        << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(workers == 1   ? "decoder on worker0, LSTM on worker0"
                                          : workers == 2 ? "decoder on worker1, LSTM on worker0"
                                                         : "decoder on worker2, LSTM on worker1"));
  }
}

TEST_F(RnnProgram, ReportsInvalidOptions) {
  EXPECT_THAT(refusal(4, {}), HasSubstr("4 workers: the model has parts for 3 at most"));
  EXPECT_THAT(refusal(2, {{"--rows", "60"}}), HasSubstr("lower --rows or --context"));
  EXPECT_THAT(refusal(2, {{"--text", "nowhere"}}), HasSubstr("fetch it with tools/fetch-data"));
  EXPECT_THAT(run(1, {{"--help", ""}}).output, HasSubstr("parts live on different workers"));
  const Outcome not_a_rate = run(1, {{"--lr", "nan"}});
  EXPECT_THAT(not_a_rate.output, HasSubstr("lr = nan"));
  EXPECT_NE(not_a_rate.exit_code, 0);
  EXPECT_NE(run(1, {{"--rows", "0"}}).exit_code, 0);
  EXPECT_NE(run(1, {{"--steps", "x"}}).exit_code, 0);
}

TEST_F(RnnProgram, EndsEveryWorkerWithAnErrorWhenTheLossIsNotFinite) {
  const Outcome outcome = run(3, {{"--lr", "1e37"}, {"--steps", "10"}});
  EXPECT_NE(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("the loss is not a finite number in step"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("this model")));
}

TEST(Windows, FollowEachOtherInEachRow) {
  const Windows windows(at::arange(27), 2, 4);
  ASSERT_EQ(windows.count(), 3);
  for (std::int64_t i = 0; i < 3; ++i) {
    const auto window = windows.at(i);
    const at::Tensor first = at::arange(4 * i, 4 * i + 4);
    EXPECT_TRUE(window.characters.equal(at::stack({first, first + 13})));
    EXPECT_TRUE(window.next.equal(window.characters + 1));
  }
}

/// Closed forms: in "abab…", each character is certain after the other one, and each is half of the text.
TEST(Corpus, KnowsTheLossesOfFrequencies) {
  const torchspan::testing::TemporaryFolder folder;
  const std::string file = folder.path() + "/text";
  {
    std::ofstream text(file);
    for (int i = 0; i < 5000; ++i) text << "ab";
  }
  const Corpus corpus(file, 3, 5);
  EXPECT_EQ(corpus.vocabulary(), 2);
  EXPECT_NEAR(corpus.frequency_loss(), std::log(2), 1e-9);
  EXPECT_NEAR(corpus.pair_loss(), std::log(4502.0 / 4501), 1e-6);
}

}  // namespace
}  // namespace rnn::program_test
