#include "launch/display/display.h"

#include <array>
#include <csignal>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <random>
#include <sys/ioctl.h>
#include <unistd.h>

#include "launch/captured.h"
#include "launch/display/terminal_screen.h"

namespace torchspan::launch::display_test {
namespace {

using ::testing::ElementsAre;

TEST(Display, WritesOutputAndErrorsApartWhereThereIsNoTerminal) {
  const auto executor = make_executor();
  Captured output, errors;
  Display display(*executor, {.output = output.descriptor(), .errors = errors.descriptor()});
  display.print_output("[worker0] ", "hello");
  display.print_error("[worker1] ", "oops");
  display.set_live({"50%"});
  display.say("torchspan: done\n");
  EXPECT_FALSE(display.is_live());
  EXPECT_EQ(output.text(), "[worker0] hello\n");
  EXPECT_EQ(errors.text(), "[worker1] oops\ntorchspan: done\n");
}

/// All workers of a job throw the same errors of joining, of groups and of pipelines.
TEST(Display, ShortensAnErrorThatAnotherWorkerHasPrinted) {
  const auto executor = make_executor();
  Captured errors;
  Display display(*executor, {.errors = errors.descriptor()});
  const std::string text =
      "failed: invalid: the workers' function tables differ: of worker0 (rank 0) and worker1 (rank 1), only "
      "worker0 has two (int32) -> int32; start the same program everywhere";
  const std::string first = text + " (call 'join', worker 'worker1', after 0.005 s)";
  const std::string other = text + ", too (call 'join', worker 'worker2', after 0.005 s)";
  const std::string program = "epoch 1: " + std::string(200, 'x');
  display.print_error("[worker1] ", first);
  display.print_error("[worker0] ", text + " (call 'join', worker 'worker0', after 0.165 s)");
  display.print_error("[worker1] ", first);
  display.print_error("[worker2] ", other);
  for (const char* prefix : {"[worker0] ", "[worker1] "}) {
    display.print_error(prefix, program);
    display.print_error(prefix, "failed: timed out: no reply (call 'add')");
  }
  EXPECT_EQ(
      errors.text(),
      "[worker1] " + first +
          "\n[worker0] failed: invalid: the workers' function tables diff… as [worker1] above (call 'join', "
          "worker 'worker0', after 0.165 s)\n[worker1] " +
          first + "\n[worker2] " + other + "\n[worker0] " + program +
          "\n[worker0] failed: timed out: no reply (call 'add')\n[worker1] " + program +
          "\n[worker1] failed: timed out: no reply (call 'add')\n");
}

/// A pseudoterminal whose other end is a TerminalScreen.
class Terminal {
 public:
  Terminal(unsigned short columns, bool rewraps) : screen_(columns, kRows, rewraps) {
    openpty(&master_, &slave_, nullptr, nullptr, nullptr);
    fcntl(master_, F_SETFL, O_NONBLOCK);
    set_size(columns);
  }
  ~Terminal() {
    close(master_);
    close(slave_);
  }
  Terminal(const Terminal&) = delete;
  int descriptor() const { return slave_; }
  void resize(unsigned short columns) {
    read_all();
    screen_.resize(columns);
    set_size(columns);
  }
  std::vector<std::string> lines() {
    read_all();
    return screen_.lines();
  }

 private:
  static constexpr unsigned short kRows = 12;
  void set_size(unsigned short columns) const {
    const winsize size{kRows, columns, 0, 0};
    ioctl(slave_, TIOCSWINSZ, &size);
  }
  void read_all() {
    std::array<char, 8192> bytes;
    for (ssize_t size; (size = read(master_, bytes.data(), bytes.size())) > 0;)
      screen_.write({bytes.data(), static_cast<std::size_t>(size)});
  }
  int master_ = -1, slave_ = -1;
  TerminalScreen screen_;
};

DisplayOptions on(const Terminal& terminal, bool rewraps) {
  return {.output = terminal.descriptor(),
          .errors = terminal.descriptor(),
          .output_terminal = true,
          .errors_terminal = true,
          .rewraps = rewraps};
}

TEST(Display, KeepsTheLiveBlockBelowTheOutput) {
  const auto executor = make_executor();
  Terminal terminal(40, true);
  Display display(*executor, on(terminal, true));
  display.print_output("", "first");
  display.set_live({"50%", "  rank 0 computes", "  rank 1 waits"});
  display.print_output("[worker0] ", "second");
  display.say("torchspan: third\n");
  EXPECT_THAT(terminal.lines(), ElementsAre("first", "[worker0] second", "torchspan: third", "50%",
                                            "  rank 0 computes", "  rank 1 waits"));
  display.set_live({"60%"});
  EXPECT_THAT(terminal.lines(), ElementsAre("first", "[worker0] second", "torchspan: third", "60%"));
  display.set_live({});
  display.print_error("", "last");
  EXPECT_THAT(terminal.lines(), ElementsAre("first", "[worker0] second", "torchspan: third", "last"));
}

TEST(Display, WritesNothingIfTheBlockIsTheSame) {
  const auto executor = make_executor();
  Captured both;
  Display display(*executor, {.output = both.descriptor(),
                              .errors = both.descriptor(),
                              .output_terminal = true,
                              .errors_terminal = true});
  display.set_live({});
  EXPECT_EQ(both.text(), "");
  display.set_live({"50%"});
  const std::size_t size = both.text().size();
  display.set_live({"50%"});
  EXPECT_EQ(both.text().size(), size);
}

TEST(Display, CutsTheBlockToTheTerminal) {
  const auto executor = make_executor();
  Terminal terminal(20, true);
  Display display(*executor, on(terminal, true));
  display.set_live(std::vector<std::string>(30, "\x1b[1;33mä line of 28 characters…\x1b[0m"));
  const auto lines = terminal.lines();
  ASSERT_EQ(lines.size(), 11u);
  for (const std::string& line : lines) EXPECT_EQ(line, "ä line of 28 charac");
}

/// Prints, redraws and resizes at random; nothing of the output may be lost, and nothing of old blocks may remain.
void expect_whole_output(bool rewraps, unsigned seed) {
  SCOPED_TRACE(fmt::format("seed {}, rewraps {}", seed, rewraps));
  std::mt19937 random(seed);
  const auto below = [&](unsigned limit) { return static_cast<std::size_t>(random() % limit); };
  const auto executor = make_executor();
  std::size_t columns = 60;
  Terminal terminal(60, rewraps);
  Display display(*executor, on(terminal, rewraps));
  std::vector<std::string> expected, block;
  for (int step = 0; step < 200; ++step) {
    switch (below(4)) {
      case 0:
        // Terminals that do not wrap anew cut what does not fit.
        expected.push_back(fmt::format("line {}", step) + std::string(rewraps ? below(70) : below(10), 'x'));
        display.print_output("", expected.back());
        break;
      case 1:
        columns = 20 + below(40);
        terminal.resize(static_cast<unsigned short>(columns));
        break;
      default:
        block.clear();
        for (std::size_t i = below(4); i > 0; --i) block.push_back("b" + std::string(below(37), 'y'));
    }
    display.set_live(block);
    std::vector<std::string> all = expected;
    for (const std::string& line : block) all.push_back(line.substr(0, columns - 1));
    ASSERT_EQ(terminal.lines(), all) << "step " << step;
  }
}

TEST(Display, LosesNoOutputAndLeavesNoOldBlock) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    expect_whole_output(true, seed);
    expect_whole_output(false, seed);
  }
}

TEST(Display, ColoursPrefixesOnlyWhenAsked) {
  EXPECT_EQ(prefix_of("worker1", 1, false), "[worker1] ");
  EXPECT_EQ(prefix_of("worker1", 1, true), "\x1b[33m[worker1]\x1b[0m ");
  EXPECT_NE(prefix_of("a", 0, true).substr(0, 5), prefix_of("a", 1, true).substr(0, 5));
}

TEST(Display, NoticesThatItsOutputIsClosed) {
  const auto executor = make_executor();
  const auto before = signal(SIGPIPE, SIG_IGN);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  Display display(*executor, {.output = ends[1], .errors = ends[1]});
  EXPECT_FALSE(display.broken());
  display.print_output("", "hello");
  EXPECT_TRUE(display.broken());
  close(ends[1]);
  signal(SIGPIPE, before);
}

TEST(Display, WaitsForASlowReaderOfANonBlockingPipe) {
  const auto executor = make_executor();
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  ASSERT_EQ(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
  const std::string line(300, 'x');
  std::string got;
  {
    const Thread reader = executor->spawn("reader", [&] {
      char bytes[4096];
      for (ssize_t size; (size = read(ends[0], bytes, sizeof bytes)) > 0;)
        got.append(bytes, static_cast<std::size_t>(size));
    });
    Display display(*executor, {.output = ends[1], .errors = ends[1]});
    for (int i = 0; i < 2000; ++i) display.print_output("", line);
    close(ends[1]);
  }
  close(ends[0]);
  EXPECT_EQ(got.size(), 2000u * 301u);
}

}  // namespace
}  // namespace torchspan::launch::display_test
