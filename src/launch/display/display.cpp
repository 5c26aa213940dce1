#include "launch/display/display.h"

#include <algorithm>
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

// Most terminals show what is between these two at once; the others ignore them.
constexpr std::string_view kHold = "\x1b[?2026h", kShow = "\x1b[?2026l";
constexpr std::string_view kClearBelow = "\x1b[J", kClearRight = "\x1b[K";
constexpr std::string_view kNoWrap = "\x1b[?7l", kWrap = "\x1b[?7h";

bool is_terminal(int descriptor) {
  const char* kind = std::getenv("TERM");
  return isatty(descriptor) == 1 && (kind == nullptr || std::string_view(kind) != "dumb");
}

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

/// Whether the terminal wraps long lines anew when its width changes: not xterm itself, the Linux console and screen.
bool rewraps_lines() {
  const char* kind = std::getenv("TERM");
  const std::string_view terminal = kind == nullptr ? "" : kind;
  if (is_set("XTERM_VERSION") || terminal == "linux") return false;
  return !terminal.starts_with("screen") || is_set("TMUX");
}

/// Calls `visit(text, visible)` for the sequences and the characters of a line.
template <class F>
void for_each_part(std::string_view line, F visit) {
  while (!line.empty()) {
    std::size_t length = 1;
    const bool sequence = line.starts_with("\x1b[");
    if (sequence) {
      length = std::min(line.find_first_of("mKJHABCDhl", 2), line.size() - 1) + 1;
    } else {
      while (length < line.size() && (static_cast<unsigned char>(line[length]) & 0xC0) == 0x80) ++length;
    }
    visit(line.substr(0, length), !sequence);
    line.remove_prefix(length);
  }
}

/// Keeps the first `columns` characters and all sequences.
std::string cut_line(std::string_view line, std::size_t columns) {
  std::string text;
  std::size_t visible = 0;
  for_each_part(line, [&](std::string_view part, bool is_visible) {
    if (!is_visible || visible++ < columns) text += part;
  });
  return text;
}

std::size_t visible_length(std::string_view line) {
  std::size_t visible = 0;
  for_each_part(line, [&](std::string_view, bool is_visible) { visible += is_visible ? 1 : 0; });
  return visible;
}

}  // namespace

DisplayOptions DisplayOptions::from_process() {
  DisplayOptions options;
  options.output_terminal = is_terminal(options.output);
  options.errors_terminal = is_terminal(options.errors);
  options.colours = options.output_terminal && options.errors_terminal && !is_set("NO_COLOR");
  options.rewraps = rewraps_lines();
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

/// An Error's text is long, and ends with what is its worker's own: " (call 'join', worker 'worker1', after 0.1 s)".
std::string Display::without_repetition(std::string_view prefix, std::string_view line) {
  constexpr std::size_t kLong = 120, kShown = 50, kMost = 16;
  const std::size_t end = line.rfind(" (call '");
  if (end == std::string_view::npos || end < kLong) return std::string(line);
  const std::string_view text = line.substr(0, end);
  const auto same = std::find_if(printed_.begin(), printed_.end(),
                                 [&](const PrintedError& printed) { return printed.text == text; });
  if (same == printed_.end()) {
    printed_.push_back({std::string(prefix), std::string(text)});
    if (printed_.size() > kMost) printed_.pop_front();
    return std::string(line);
  }
  if (same->prefix == prefix) return std::string(line);
  return fmt::format("{}… as {}above{}", cut_line(text, kShown), same->prefix, line.substr(end));
}

void Display::print_error(std::string_view prefix, std::string_view line) {
  print(options_.errors, options_.errors_terminal,
        fmt::format("{}{}\n", prefix, without_repetition(prefix, line)));
}

void Display::say(std::string_view text) {
  print(options_.errors, options_.errors_terminal, std::string(text));
}

void Display::print(int descriptor, bool terminal, std::string text) {
  if (terminal && !live_.empty()) {
    text = fmt::format("{}{}{}{}{}{}", kHold, to_block(), kClearBelow, text, draw_block(), kShow);
  }
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

void Display::note_lost_log(const std::string& text) {
  say(fmt::format("torchspan: {}\n", text));
  if (lost_log_.empty()) lost_log_ = text;
}

std::string Display::losses() const {
  if (lost_ == 0) return lost_log_;
  return fmt::format("{} line{} of the output could not be written: {}", lost_, lost_ == 1 ? "" : "s",
                     std::strerror(loss_reason_));
}

Display::Size Display::size() const {
  winsize size{};
  if (ioctl(options_.errors, TIOCGWINSZ, &size) != 0) return {options_.width, options_.height};
  return {size.ws_col > 1 ? size.ws_col : options_.width, size.ws_row > 0 ? size.ws_row : options_.height};
}

void Display::set_live(std::vector<std::string> lines) {
  if (!is_live()) return;
  const Size now = size();
  lines.resize(std::min(lines.size(), std::max<std::size_t>(now.rows, 2) - 1));
  if (lines == live_ && (lines.empty() || now.columns == drawn_width_)) return;
  const std::string start = to_block();
  live_ = std::move(lines);
  write_all(options_.errors, fmt::format("{}{}{}{}", kHold, start, draw_block(), kShow));
}

std::string Display::to_block() const {
  if (live_.empty()) return "";
  std::size_t above = live_.size() - 1;
  const std::size_t columns = width();
  if (options_.rewraps && columns < drawn_width_) {
    above = 0;
    for (std::size_t i = 0; i + 1 < live_.size(); ++i) {
      const std::size_t length = std::min(visible_length(live_[i]), drawn_width_ - 1);
      above += std::max<std::size_t>(1, (length + columns - 1) / columns);
    }
  }
  return above == 0 ? "\r" : fmt::format("\r\x1b[{}A", above);
}

std::string Display::draw_block() {
  drawn_width_ = width();
  std::string text(kNoWrap);
  for (std::size_t i = 0; i < live_.size(); ++i) {
    // The last column stays empty: clearing to the right of a full line would remove its last character.
    text += fmt::format("{}{}{}", i == 0 ? "" : "\r\n", cut_line(live_[i], drawn_width_ - 1), kClearRight);
  }
  return fmt::format("{}{}\r{}", text, kClearBelow, kWrap);
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
