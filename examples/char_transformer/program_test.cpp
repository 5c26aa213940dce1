// Runs the example as users do, on a text that repeats.
#include <CLI/CLI.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "char_transformer/example_program.h"
#include "char_transformer/text.h"
#include "char_transformer/training_options.h"

namespace char_transformer::program_test {
namespace {

using ::testing::HasSubstr;

class CharTransformerProgram : public ExampleProgram {
 protected:
  CharTransformerProgram()
      : ExampleProgram("char_transformer_pipeline",
                       {{"--width", "16"},
                        {"--heads", "2"},
                        {"--context", "16"},
                        {"--batch", "8"},
                        {"--prompt", "call"},
                        {"--sample", "10"}},
                       "the whale — the white whale; call me ") {}

  Outcome run(int workers, const std::vector<std::string>& arguments) const {
    Arguments pairs;
    for (std::size_t i = 0; i + 1 < arguments.size(); i += 2) pairs[arguments[i]] = arguments[i + 1];
    return ExampleProgram::run(workers, pairs);
  }
  static double loss_in(const std::string& output) {
    std::smatch match;
    return std::regex_search(output, match, std::regex("not trained on: ([0-9.]+)")) ? std::stod(match[1])
                                                                                     : -1;
  }
};

TEST_F(CharTransformerProgram, LearnsTheSameOnAnyNumberOfWorkersAndWithCopiesOfTheMatrix) {
  double alone = 0;
  std::vector<std::string> arguments = {"--steps", "45", "--dropout", "0.1"};
  for (const bool tied : {false, true}) {
    if (tied) arguments.insert(arguments.end(), {"--tied", ""});
    for (const int workers : {1, 2, 3}) {
      const Outcome outcome = run(workers, arguments);
      EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
      const double loss = loss_in(outcome.output);
      EXPECT_GT(loss, 0) << outcome.output;
      EXPECT_LT(loss, 2.0) << "evenly guessed: 2.996\n" << outcome.output;
      if (workers == 1) alone = loss;
      EXPECT_NEAR(loss, alone, 0.01) << workers << " workers";
      EXPECT_THAT(outcome.output, HasSubstr("call")) << "the sample";
    }
  }
  for (const char* schedule : {"zb-h1", "zbv"}) {
    std::vector<std::string> split = arguments;  // backwards, which have copies of the matrix
    split.insert(split.end(), {"--schedule", schedule});
    const Outcome outcome = run(2, split);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_NEAR(loss_in(outcome.output), alone, 0.01) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("call")) << "the sample";
  }
}

TEST_F(CharTransformerProgram, ResumesWithTiedCopies) {
  const std::vector<std::string> common = {"--dropout",  "0",     "--tied",       "",
                                           "--schedule", "zb-h1", "--checkpoint", folder_.path() + "/state"};
  std::vector<std::string> first = common, second = common, alone = {common.begin(), common.end() - 2};
  first.insert(first.end(), {"--steps", "20"});
  second.insert(second.end(), {"--steps", "40"});
  alone.insert(alone.end(), {"--steps", "40"});
  EXPECT_EQ(run(2, first).exit_code, 0);
  const Outcome resumed = run(2, second);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_NEAR(loss_in(resumed.output), loss_in(run(2, alone).output), 1e-3);
}

TEST_F(CharTransformerProgram, DrawsItsLastStepBesideThePlan) {
  const std::string drawing = folder_.path() + "/step.svg";
  const Outcome outcome = run(2, {"--steps", "2", "--draw", drawing});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  std::ifstream file(drawing);
  const std::string svg{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(svg, HasSubstr("1f1b"));
  EXPECT_THAT(svg, HasSubstr("measured"));
}

TEST_F(CharTransformerProgram, ReportsBeforeTrainingThatADrawingCannotBeWritten) {
  const std::string drawing = folder_.path() + "/nowhere/step.svg";
  const std::string output = refusal(2, {{"--draw", drawing}});
  EXPECT_THAT(output, HasSubstr("--draw " + drawing + ": this file cannot be written"));
  EXPECT_THAT(output, ::testing::Not(HasSubstr("drew")));
  EXPECT_EQ(run(2, {"--steps", "2", "--draw", "/dev/full"}).exit_code, 1);
}

TEST_F(CharTransformerProgram, EndsWithAnErrorWhenALossIsNotFinite) {
  // After the last step, only the loss on held-out text shows the failure.
  const Outcome last = run(2, {"--steps", "1", "--lr", "1e30"});
  EXPECT_EQ(last.exit_code, 1) << last.output;
  EXPECT_THAT(last.output, HasSubstr("is not a finite number after step 0: lower --lr"));
  const Outcome inside = run(2, {"--steps", "3", "--lr", "1e30"});
  EXPECT_EQ(inside.exit_code, 1) << inside.output;
  EXPECT_THAT(inside.output, HasSubstr("the loss is not a finite number after step"));
}

TEST_F(CharTransformerProgram, ReportsInvalidOptions) {
  EXPECT_THAT(refusal(2, {{"--heads", "3"}}), HasSubstr("--width 16 is not a multiple of --heads 3"));
  EXPECT_THAT(refusal(3, {{"--blocks", "2"}}), HasSubstr("3 workers cannot share 2 blocks"));
  EXPECT_THAT(refusal(2, {{"--text", "nowhere"}}), HasSubstr("fetch it with tools/fetch-data"));
  EXPECT_THAT(refusal(2, {{"--prompt", "Q"}}), HasSubstr("'Q' of the prompt does not occur in the text"));
  EXPECT_THAT(refusal(2, {{"--context", "5000"}}), HasSubstr("lower --context"));
}

TEST(PipelineTrainingOptions, RefuseAnEmptyPrompt) {
  const auto parse = [](const char* prompt) {
    CLI::App app;
    PipelineTrainingOptions options;
    add_pipeline_options(app, options);
    const char* const arguments[] = {"program", "--prompt", prompt};
    app.parse(3, arguments);
    return options.prompt;
  };
  EXPECT_EQ(parse("call"), "call");
  EXPECT_THROW(parse(""), CLI::ValidationError);
}

TEST(Text, DecodesWhatItEncoded) {
  const Text text = Text::from(U"a—bß\U0001F40B“c”");
  EXPECT_EQ(text.vocabulary(), 8);
  EXPECT_EQ(text.decode(text.encode("ß—\xF0\x9F\x90\x8B"
                                    "a")),
            "ß—\xF0\x9F\x90\x8B"
            "a");
  EXPECT_THROW(text.encode("z"), torchspan::Error);
  EXPECT_THROW(text.encode("\xFF"), torchspan::Error);
}

TEST(Text, KeepsHeldOutWindowsApart) {
  std::u32string characters;
  for (char32_t i = 0; i < 1000; ++i) characters.push_back(U'a' + i);
  const Text text = Text::from(characters);
  const auto training = text.windows(500, 8, 1, false), held_out = text.windows(500, 8, 1, true);
  EXPECT_LT(training.next.max().item<std::int64_t>(), 900);
  EXPECT_GE(held_out.characters.min().item<std::int64_t>(), 900);
  EXPECT_TRUE((training.next == training.characters + 1).all().item<bool>());
}

}  // namespace
}  // namespace char_transformer::program_test
