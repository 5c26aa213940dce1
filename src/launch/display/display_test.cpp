#include "launch/display/display.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "launch/captured.h"

namespace torchspan::launch::display_test {
namespace {

TEST(Display, WritesOutputAndErrorsApartWhereThereIsNoTerminal) {
  const auto executor = make_executor();
  Captured output, errors;
  Display display(*executor, {.output = output.descriptor(), .errors = errors.descriptor()});
  display.print_output("[worker0] ", "hello");
  display.print_error("[worker1] ", "oops");
  display.set_live("50%");
  display.say("torchspan: done\n");
  EXPECT_FALSE(display.is_live());
  EXPECT_EQ(output.text(), "[worker0] hello\n");
  EXPECT_EQ(errors.text(), "[worker1] oops\ntorchspan: done\n");
}

TEST(Display, KeepsTheLiveLineAtTheBottom) {
  const auto executor = make_executor();
  Captured both;
  Display display(*executor, {.output = both.descriptor(),
                              .errors = both.descriptor(),
                              .output_terminal = true,
                              .errors_terminal = true});
  display.set_live("50%");
  display.set_live("50%");
  display.print_output("", "hello");
  display.set_live("");
  display.print_output("", "bye");
  EXPECT_EQ(both.text(), "\r\x1b[2K50%\r\x1b[2Khello\n50%\r\x1b[2Kbye\n");
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
