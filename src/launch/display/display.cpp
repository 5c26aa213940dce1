#include "launch/display/display.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <utility>

namespace torchspan::launch {
namespace {

constexpr std::string_view kClearLine = "\r\x1b[2K";

bool is_terminal(int descriptor) {
  const char* kind = std::getenv("TERM");
  return isatty(descriptor) == 1 && (kind == nullptr || std::string_view(kind) != "dumb");
}

}  // namespace

DisplayOptions DisplayOptions::from_process() {
  DisplayOptions options;
  options.output_terminal = is_terminal(options.output);
  options.errors_terminal = is_terminal(options.errors);
  const char* no_colour = std::getenv("NO_COLOR");
  options.colours =
      options.output_terminal && options.errors_terminal && (no_colour == nullptr || *no_colour == '\0');
  return options;
}

std::string prefix_of(const std::string& name, int rank, bool colours) {
  if (!colours) return fmt::format("[{}] ", name);
  constexpr std::array kColours = {36, 33, 35, 32, 34, 31};
  return fmt::format("\x1b[{}m[{}]\x1b[0m ", kColours[static_cast<std::size_t>(rank) % kColours.size()],
                     name);
}

void Display::print_output(std::string_view prefix, std::string_view line) {
  print(options_.output, options_.output_terminal, fmt::format("{}{}\n", prefix, line));
}

void Display::print_error(std::string_view prefix, std::string_view line) {
  print(options_.errors, options_.errors_terminal, fmt::format("{}{}\n", prefix, line));
}

void Display::say(std::string_view text) {
  print(options_.errors, options_.errors_terminal, std::string(text));
}

void Display::print(int descriptor, bool terminal, std::string text) {
  if (terminal && !live_.empty()) text = std::string(kClearLine) + text + live_;
  if (!write_all(descriptor, text) && errno != EPIPE) note_loss(descriptor, errno);
}

void Display::note_loss(int descriptor, int reason) {
  if (lost_++ != 0) return;
  loss_reason_ = reason;
  if (descriptor == options_.errors) return;
  write_all(options_.errors,
            fmt::format("torchspan: standard output cannot be written: {}; output that it does not "
                        "accept is lost\n",
                        std::strerror(reason)));
}

std::string Display::losses() const {
  if (lost_ == 0) return "";
  return fmt::format("{} line{} of the output could not be written: {}", lost_, lost_ == 1 ? "" : "s",
                     std::strerror(loss_reason_));
}

std::size_t Display::width() const {
  winsize size{};
  return ioctl(options_.errors, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : options_.width;
}

void Display::set_live(std::string line) {
  if (!is_live() || line == live_) return;
  live_ = std::move(line);
  write_all(options_.errors, std::string(kClearLine) + live_);
}

bool Display::write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const auto written = write(descriptor, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      wait_writable(descriptor);  // another process made it non-blocking; its reader sets the pace
    } else if (errno != EINTR) {
      broken_ = broken_ || errno == EPIPE;
      return false;
    }
  }
  return true;
}

void Display::wait_writable(int descriptor) {
  const auto poller = executor_.make_poller();
  std::array<Poller::Event, 1> events;
  poller->add(descriptor, 0, true);
  for (bool writable = false; !writable;) {
    writable = poller->wait(events, Deadline::never()) == 1 && (events[0].writable || events[0].hung_up);
  }
}

}  // namespace torchspan::launch
