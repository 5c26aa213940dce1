#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <random>
#include <unistd.h>

#include <torchspan/core/observation.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/sim_executor.h"

namespace torchspan::progress_test {
namespace {

ProgressReport full_report() {
  ProgressReport report;
  report.epoch = 2;
  report.epochs = 5;
  report.step = 17;
  report.steps = 469;
  report.loss = 0.5125;
  report.rate = 5120;
  report.unit = "images";
  report.text = "warm up 100% done\nsecond";
  report.seconds_left = 63;
  return report;
}

class Pipe {
 public:
  Pipe() { EXPECT_EQ(pipe2(ends_.data(), O_NONBLOCK | O_CLOEXEC), 0); }
  ~Pipe() {
    close(ends_[0]);
    close(ends_[1]);
  }
  int write_end() const { return ends_[1]; }
  std::string take() const {
    std::string all(1 << 16, '\0');
    const auto got = read(ends_[0], all.data(), all.size());
    all.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return all;
  }

 private:
  std::array<int, 2> ends_{};
};

/// Runs `body` as the only thread of a simulated machine.
void simulate(const std::function<void(SimExecutor&)>& body) {
  SimExecutor executor(1);
  executor.run([&] { body(executor); });
}

std::size_t count_lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(Progress, FormatsEveryFieldInOneLine) {
  EXPECT_EQ(format_progress(full_report()),
            "epoch 2/5  step 17/469  loss 0.5125  5,120 images/s  1m03s left  warm up 100% done second");
}

TEST(Progress, OmitsFieldsThatWereNotReported) {
  EXPECT_EQ(format_progress({}), "");
  ProgressReport report;
  report.step = 3;
  EXPECT_EQ(format_progress(report), "step 3");
  report.steps = 4;
  report.rate = 1234567;
  EXPECT_EQ(format_progress(report), "step 3/4  1,234,567 samples/s");
}

TEST(Progress, CutsLongLinesBetweenCharacters) {
  ProgressReport report;
  report.text = "ääää";
  EXPECT_EQ(format_progress(report, 3), "äää");
  EXPECT_EQ(format_progress(report, 4), "ääää");
}

TEST(Progress, FormatsTimesOfAnyLength) {
  EXPECT_EQ(format_seconds(0.4), "0s");
  EXPECT_EQ(format_seconds(59.6), "1m00s");
  EXPECT_EQ(format_seconds(63), "1m03s");
  EXPECT_EQ(format_seconds(3600 * 2 + 5 * 60 + 59), "2h05m");
  EXPECT_EQ(format_seconds(std::nan("")), "?");
}

TEST(Progress, DecodesWhatItEncoded) {
  const ProgressReport report = full_report();
  const std::string line = encode_progress(report);
  EXPECT_EQ(count_lines(line), 1u);
  const auto back = decode_progress(line);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->epoch, report.epoch);
  EXPECT_EQ(back->epochs, report.epochs);
  EXPECT_EQ(back->step, report.step);
  EXPECT_EQ(back->steps, report.steps);
  EXPECT_EQ(back->loss, report.loss);
  EXPECT_EQ(back->rate, report.rate);
  EXPECT_EQ(back->unit, report.unit);
  EXPECT_EQ(back->text, report.text);
  EXPECT_EQ(back->seconds_left, report.seconds_left);
}

TEST(Progress, WritesLinesThatFitIntoOneWriteToAPipe) {
  ProgressReport report = full_report();
  for (const std::string& long_text : {std::string(100'000, ' '), std::string(100'000, '\xc3'),
                                       std::string(100'000, '\x80'), std::string(5000, 'x')}) {
    report.text = report.unit = long_text;
    const std::string line = encode_progress(report);
    EXPECT_LT(line.size(), std::size_t{PIPE_BUF});
    EXPECT_TRUE(decode_progress(line));
  }
  EXPECT_EQ(decode_progress(encode_progress(report))->text, std::string(250, 'x'));
}

TEST(Progress, DecodesLinesWithUnknownKeysAndRejectsInvalidOnes) {
  ASSERT_TRUE(decode_progress("torchspan-progress 1 step=3 colour=blue"));
  EXPECT_EQ(decode_progress("torchspan-progress 1 step=3 colour=blue")->step, 3);
  EXPECT_FALSE(decode_progress("torchspan-progress 12 step=3"));
  EXPECT_FALSE(decode_progress("torchspan-progress 1 step=three"));
  EXPECT_FALSE(decode_progress("torchspan-progress 1 step"));
  EXPECT_FALSE(decode_progress("something else"));
  EXPECT_FALSE(decode_progress(""));
}

TEST(Progress, DecodesEveryByteStringToAReportOrNothing) {
  std::mt19937_64 random(7);
  SCOPED_TRACE("seed 7");
  const std::string good = encode_progress(full_report());
  for (int round = 0; round < 20000; ++round) {
    std::string line = good;
    for (int change = 0; change < 3; ++change) line[random() % line.size()] = static_cast<char>(random());
    line.resize(random() % (line.size() + 1));
    if (const auto report = decode_progress(line)) format_progress(*report, random() % 100);
  }
}

TEST(Progress, ComputesTheCompletedFraction) {
  ProgressReport report;
  EXPECT_FALSE(fraction_done(report));
  report.epoch = 2;
  report.epochs = 4;
  EXPECT_DOUBLE_EQ(*fraction_done(report), 0.5);
  report.step = 5;
  report.steps = 10;
  EXPECT_DOUBLE_EQ(*fraction_done(report), 0.375);
  report.epochs = 0;
  EXPECT_DOUBLE_EQ(*fraction_done(report), 0.5);
}

TEST(Progress, ReportsTheRemainingTimeToTheLauncher) {
  simulate([](SimExecutor& executor) {
    const Pipe pipe;
    Progress progress(executor, {.launcher_descriptor = pipe.write_end()});
    ProgressReport report;
    report.steps = 10;
    progress.report(report);
    pipe.take();
    executor.sleep(std::chrono::seconds(2));
    report.step = 4;
    progress.report(report);
    const auto decoded = decode_progress(pipe.take());
    ASSERT_TRUE(decoded);
    EXPECT_EQ(decoded->step, 4);
    ASSERT_TRUE(decoded->seconds_left);
    EXPECT_NEAR(*decoded->seconds_left, 3.0, 1e-9);
  });
}

/// Something that has a runtime, as a Session does.
struct Traced {
  explicit Traced(Executor& executor) : services(executor, "test") {}
  Runtime& runtime() { return services; }
  Runtime services;
};

TEST(Progress, RecordsTheTimeBetweenReportsAsAStepIfTheRunIsTraced) {
  simulate([](SimExecutor& executor) {
    const Pipe pipe;
    for (const bool traced : {false, true}) {
      Traced source(executor);
      if (traced) source.services.spans.set_traced(100);
      Progress progress(source, {.launcher_descriptor = pipe.write_end()});
      ProgressReport report;
      report.epoch = 1;
      report.epochs = report.steps = 2;
      const TimePoint began = executor.now();
      progress.report(report);  // nothing is known about the time before
      for (report.epoch = 1; report.epoch <= 2; ++report.epoch) {
        for (report.step = 1; report.step <= 2; ++report.step) {
          executor.sleep(std::chrono::milliseconds(10));
          progress.report(report);
        }
      }
      const auto spans = source.services.spans.snapshot();
      ASSERT_EQ(spans.size(), traced ? 4u : 0u);
      for (std::size_t i = 0; i < spans.size(); ++i) {
        EXPECT_EQ(spans[i].name, "progress");
        EXPECT_EQ(spans[i].id, i + 1);
        EXPECT_EQ(spans[i].begin, began + static_cast<int>(i) * std::chrono::milliseconds(10));
        EXPECT_EQ(spans[i].end - spans[i].begin, std::chrono::milliseconds(10));
      }
    }
  });
}

TEST(Progress, ShowsTenReportsPerSecondAndAlwaysTheLast) {
  simulate([](SimExecutor& executor) {
    const Pipe pipe;
    Progress progress(executor, {.launcher_descriptor = pipe.write_end()});
    ProgressReport report;
    for (int i = 1; i <= 1005; ++i) {
      report.step = i;
      progress.report(report);
      executor.sleep(std::chrono::milliseconds(1));
    }
    progress.finish();
    const std::string all = pipe.take();
    EXPECT_LE(count_lines(all), 12u);
    EXPECT_GE(count_lines(all), 10u);
    EXPECT_NE(all.find("step=1005"), std::string::npos);
  });
}

TEST(Progress, DropsReportsThatTheLauncherDoesNotRead) {
  simulate([](SimExecutor& executor) {
    const Pipe pipe;
    Progress progress(executor, {.launcher_descriptor = pipe.write_end(), .draw_every = Duration::zero()});
    ProgressReport report;
    report.text = std::string(1000, 'x');
    for (report.step = 1; report.step <= 1000; ++report.step) progress.report(report);
    EXPECT_LT(count_lines(pipe.take()), 65536u / 250)
        << "a pipe holds 64 KiB, and each line more than 250 bytes";
  });
}

TEST(Progress, RedrawsOneLineOnATerminal) {
  simulate([](SimExecutor& executor) {
    const Pipe pipe;
    Progress progress(executor, {.descriptor = pipe.write_end(), .terminal = true, .width = 10});
    ProgressReport report;
    report.text = "a text of more than ten";
    progress.report(report);
    EXPECT_EQ(pipe.take(), "\r\x1b[2Ka text of");
    progress.finish();
    EXPECT_EQ(pipe.take(), "\n");
    progress.finish();
    EXPECT_EQ(pipe.take(), "");
  });
}

TEST(Progress, PrintsAPlainLineEveryTenSecondsWithoutATerminal) {
  simulate([](SimExecutor& executor) {
    const Pipe pipe;
    Progress progress(executor, {.descriptor = pipe.write_end(), .terminal = false});
    ProgressReport report;
    for (int second = 0; second <= 30; ++second) {
      report.step = second + 1;
      progress.report(report);
      executor.sleep(std::chrono::seconds(1));
    }
    EXPECT_EQ(pipe.take(), "step 1\nstep 11\nstep 21\nstep 31\n");
  });
}

}  // namespace
}  // namespace torchspan::progress_test
